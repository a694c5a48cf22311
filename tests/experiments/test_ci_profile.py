"""The `ci` profile for real: real trainer, real Accelerate checkpoints, `chronicle run`, guard on, runner killed on the way."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from chronicle.journal import read_journal
from chronicle.journal.events import EntryKind
from experiments.definition import find_study
from experiments.design import StudyPlan, plan_study
from experiments.files import LegResult, StudyPaths
from experiments.history import list_ready, read_history
from experiments.launches import LegLaunch
from experiments.outcomes import read_study
from experiments.report import build_report
from experiments.runner import ChronicleLauncher, read_registered, run_study

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COMMAND = [sys.executable, "-m", "chronicle.cli.main", "experiment", "run", "restart-impact", "--profile", "ci"]


def small_plan(*arms: str) -> StudyPlan:
    study = find_study("restart-impact")
    sizes = replace(study.profile("ci"), seeds=1, arms=arms, once=())
    return plan_study(replace(study, profiles=(sizes,)), "ci")


def start_runner(logs: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, "--logs", str(logs)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> StudyPaths:
    """A finished study, whose runner was killed with KILL after its second launch."""
    logs = tmp_path_factory.mktemp("logs")
    runner = start_runner(logs)
    assert runner.stderr is not None
    for _ in range(2):
        assert "done" in runner.stderr.readline()
    os.kill(runner.pid, signal.SIGKILL)
    runner.communicate()
    again = start_runner(logs)
    out, err = again.communicate(timeout=800)
    assert again.returncode == 0, err
    assert "8 of 8 runs complete" in out
    return StudyPaths(logs / "restart-impact-ci")


@pytest.mark.sample
def test_exact_restarts_in_fresh_processes_change_no_bit(paths: StudyPaths) -> None:
    """A′ ≡ A: three restarts through Accelerate's own save and load, weights, moments, averages and all losses."""
    data = read_study(*read_registered(paths), paths)
    one, other = data.runs["A", 0], data.runs["A-prime", 0]
    assert len(other.finished) == 4
    assert one.finished[-1].weights == other.finished[-1].weights
    assert one.finished[-1].moments == other.finished[-1].moments
    assert one.channels["loss"].tolist() == other.channels["loss"].tolist()
    assert len(set(one.channels["loss"].tolist())) == 40


@pytest.mark.sample
def test_the_report_passes_its_own_gates_and_is_not_empty(paths: StudyPaths, tmp_path: Path) -> None:
    build_report(paths, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| exact restart, seed 0 |" in text and "identical" in text
    assert "equal: data_digest until 10, loss until 10, lr until 40, of 40" in text
    assert len(text) > 5000


@pytest.mark.sample
def test_the_killed_runner_left_nothing_counted_twice(paths: StudyPaths) -> None:
    plan, history = read_registered(paths)
    done = [(entry.data["run"], entry.data["leg"]) for entry in read_journal(paths.journal).of_kind(EntryKind.EXPERIMENT_LEG)]
    assert len(done) == len(set(done)) == plan.num_launches == 17
    assert not list(list_ready(plan, history))


@pytest.mark.sample
def test_every_launch_went_through_chronicle_run_with_the_guard_on(paths: StudyPaths) -> None:
    plan, history = read_registered(paths)
    for run in plan.runs:
        entries = read_journal(paths.run(run.name)).entries
        for finished in history.done[run.name]:
            kinds = {entry.kind for entry in entries if entry.launch == finished.launch}
            assert {"launch.start", "launch.end"} <= kinds
            assert finished.guard == "passed"


@pytest.mark.sample
def test_training_learned_something(paths: StudyPaths) -> None:
    """The losses are a model's: below the coin flip, falling."""
    plan, history = read_registered(paths)
    data = read_study(plan, history, paths)
    assert 8.0 > history.done["start"][-1].final["eval_bpb"] > data.runs["A", 0].final["eval_bpb"] > 2.0


@pytest.fixture(scope="module")
def ablated(paths: StudyPaths, tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyPlan, StudyPaths]:
    """One seed of the ablations, from the same start checkpoint (copied, not trained again)."""
    import shutil

    plan = small_plan("A", "B-opt", "B-lr")
    other = StudyPaths(tmp_path_factory.mktemp("ablated") / "study")
    for part in ("runs/start", "checkpoints/start"):
        shutil.copytree(paths.study_dir / part, other.study_dir / part)
    return plan, other


class StartedLauncher(ChronicleLauncher):
    """Takes the start from a finished study: same profile, same data, same checkpoint."""

    def start(self, launch):  # type: ignore[no-untyped-def]
        return Taken(launch) if launch.run.name == "start" else super().start(launch)


class Taken:
    def __init__(self, launch: LegLaunch) -> None:
        self.launch = launch

    def poll(self) -> int:
        return 0

    def finish(self) -> LegResult:
        return self.launch.read(1, "passed")

    def stop(self) -> None:
        """Nothing runs."""


def test_planted_losses_of_state_take_place_and_the_guard_notices_them(ablated: tuple[StudyPlan, StudyPaths]) -> None:
    """B-opt and B-lr: the same batches, another loss from the restart on, LR unequal only where the schedule is lost."""
    plan, paths = ablated
    outcome = run_study(plan, paths, StartedLauncher(paths, dict(os.environ)), jobs=2)
    assert not outcome.stopped
    data = read_study(*read_registered(paths), paths)
    base = data.runs["A", 0]
    for arm in ("B-opt", "B-lr"):
        run = data.runs[arm, 0]
        assert [finished.guard for finished in run.finished] == ["passed", "warned"]
        assert run.channels["data_digest"].tolist() == base.channels["data_digest"].tolist()
        assert run.channels["loss"][:21].tolist() == base.channels["loss"][:21].tolist()
        assert run.channels["loss"][24] != base.channels["loss"][24]
        assert (run.channels["lr"].tolist() == base.channels["lr"].tolist()) == (arm == "B-opt")


def test_a_stray_file_in_a_checkpoint_stops_that_run_and_the_rest_goes_on(
    ablated: tuple[StudyPlan, StudyPaths], tmp_path: Path
) -> None:
    """The accident of the seed between two launches of an arm: nothing starts, the study says so and goes on."""
    import shutil

    _, finished = ablated
    plan = small_plan("A", "C0")
    paths = StudyPaths(tmp_path / "study")
    for part in ("runs/start", "checkpoints/start"):
        shutil.copytree(finished.study_dir / part, paths.study_dir / part)

    class Careless(StartedLauncher):
        def start(self, launch):  # type: ignore[no-untyped-def]
            if (launch.run.name, launch.leg.number) == ("A-prime-s0", 2):
                checkpoint = launch.resume_path / "accelerator_state"
                shutil.copy(checkpoint / "custom_checkpoint_0.pkl", checkpoint / "custom_checkpoint_0.pkl.orig")
            return super().start(launch)

    outcome = run_study(plan, paths, Careless(paths, dict(os.environ)), jobs=2, only=["start", "A-prime-s0", "C0-s0"])
    assert set(outcome.stopped) == {"A-prime-s0"}
    assert outcome.stopped["A-prime-s0"].startswith("not started: preflight PF30")
    assert "custom_checkpoint_0.pkl.orig" in outcome.stopped["A-prime-s0"]
    assert "C0-s0" in outcome.complete
    assert read_history(read_journal(paths.journal).entries).stopped == outcome.stopped
