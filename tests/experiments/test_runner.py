"""The runner: registered first, killable anywhere, nothing counted twice, one failure stops one run."""

import errno
import itertools
from pathlib import Path

import pytest

from chronicle.errors import JournalError
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import EntryKind
from experiments.definition import parse_study
from experiments.design import START, Leg, StudyPlan, StudyRun, plan_study
from experiments.errors import NotRegistered
from experiments.files import StudyPaths
from experiments.history import list_ready, read_history
from experiments.launches import LegLaunch
from experiments.outcomes import read_study
from experiments.runner import read_registered, run_study
from tests.experiments.fakes import FakeLauncher

STUDY = """
v: 1
name: small
title: small
trainer: {command: [train]}
reference: X
arms:
  X: {slices: [1, 2]}
  Y: {slices: [1, 2], restart: {}}
  Z: {slices: [1, 2], restart: {at: [1.5]}}
contrasts: {}
profiles:
  tiny: {start_updates: 2, slice_updates: 4, seeds: 2, arms: [X, Y, Z]}
"""
EVERY_LEG = [(START, 1), ("X-s0", 1), ("Y-s0", 1), ("Z-s0", 1), ("X-s1", 1), ("Y-s1", 1), ("Z-s1", 1),
             ("Y-s0", 2), ("Z-s0", 2), ("Y-s1", 2), ("Z-s1", 2)]  # fmt: skip


class Killed(BaseException):
    """The runner's process is gone: nothing after this runs in it."""


@pytest.fixture
def plan() -> StudyPlan:
    return plan_study(parse_study(STUDY), "tiny")


@pytest.fixture
def paths(tmp_path: Path) -> StudyPaths:
    return StudyPaths(tmp_path / "study")


def counted(paths: StudyPaths) -> list[tuple[str, int]]:
    history = read_history(read_journal(paths.journal).entries)
    return sorted((run, done.launch // 10) for run, legs in history.done.items() for done in legs)  # as FakeRunning counts them


def no_sleep(seconds: float) -> None:
    raise AssertionError("a fake launch has always ended")


def test_the_registration_comes_before_the_first_launch(plan: StudyPlan, paths: StudyPaths) -> None:
    run_study(plan, paths, FakeLauncher(paths), sleep=no_sleep)
    kinds = [entry.kind for entry in read_journal(paths.journal).entries]
    assert kinds[:2] == [EntryKind.EXPERIMENT_REGISTER, EntryKind.EXPERIMENT_LAUNCH]
    entry = next(read_journal(paths.journal).of_kind(EntryKind.EXPERIMENT_REGISTER))
    assert entry.data["plan"]["study"]["margin_bpb"] == 0.02
    assert entry.data["plan_hash"] == plan.plan_hash
    assert read_registered(paths)[0].plan_hash == plan.plan_hash


def test_every_leg_is_launched_once_and_in_order(plan: StudyPlan, paths: StudyPaths) -> None:
    launcher = FakeLauncher(paths)
    outcome = run_study(plan, paths, launcher, sleep=no_sleep)
    assert sorted(launcher.started) == sorted(EVERY_LEG)
    assert launcher.started[0] == (START, 1)
    for name, _ in EVERY_LEG:
        assert [leg for run, leg in launcher.started if run == name] in ([1], [1, 2])
    assert (len(outcome.complete), outcome.stopped, outcome.open) == (7, {}, ())


def test_a_finished_study_launches_nothing_more(plan: StudyPlan, paths: StudyPaths) -> None:
    run_study(plan, paths, FakeLauncher(paths), sleep=no_sleep)
    again = FakeLauncher(paths)
    run_study(plan, paths, again, sleep=no_sleep)
    assert again.started == []


@pytest.mark.parametrize("kill_at", range(1, 12))
@pytest.mark.parametrize("jobs", [1, 2])
def test_killed_at_any_launch_it_goes_on_and_counts_nothing_twice(
    plan: StudyPlan, paths: StudyPaths, kill_at: int, jobs: int
) -> None:
    """The runner dies as the `kill_at`-th launch starts (only its `experiment.launch` entry is written); then it runs again."""
    count = itertools.count(1)

    def fate(run: StudyRun, leg: Leg) -> int:
        if next(count) == kill_at:
            raise Killed
        return 0

    with pytest.raises(Killed):
        run_study(plan, paths, FakeLauncher(paths, fate), jobs=jobs, sleep=no_sleep)
    outcome = run_study(plan, paths, FakeLauncher(paths), jobs=jobs, sleep=no_sleep)
    assert counted(paths) == sorted(EVERY_LEG)
    assert not outcome.open


def test_a_leg_reported_twice_counts_once(plan: StudyPlan, paths: StudyPaths) -> None:
    """Two runners at the same time (a SLURM array started twice): the first result of a leg is the result."""
    run_study(plan, paths, FakeLauncher(paths), sleep=no_sleep)
    before = read_history(read_journal(paths.journal).entries)
    entry = list(read_journal(paths.journal).of_kind(EntryKind.EXPERIMENT_LEG))[3]
    with JournalWriter(paths.journal) as writer:
        writer.append(EntryKind.EXPERIMENT_LEG, data={**entry.data, "launch": 99})
    after = read_history(read_journal(paths.journal).entries)
    assert after == before
    data = read_study(plan, after, paths)
    assert [len(run.channels["loss"]) for run in data.runs.values()] == [8] * 6


@pytest.mark.parametrize(
    "fate",
    [137, 78, 1, OSError(errno.ENOSPC, "No space left on device", "/full"), OSError(errno.EACCES, "Permission denied", "/x")],
    ids=["killed", "guard", "no-data", "disk-full", "not-startable"],
)
def test_a_failed_launch_stops_its_run_with_a_reason_and_the_rest_goes_on(
    plan: StudyPlan, paths: StudyPaths, fate: int | Exception
) -> None:
    def fates(run: StudyRun, leg: Leg) -> int | Exception:
        return fate if (run.name, leg.number) == ("Y-s0", 2) else 0

    launcher = FakeLauncher(paths, fates)
    outcome = run_study(plan, paths, launcher, sleep=no_sleep)
    assert set(outcome.stopped) == {"Y-s0"}
    assert str(fate if isinstance(fate, int) else fate.strerror) in outcome.stopped["Y-s0"]
    assert len(outcome.complete) == 6
    assert launcher.started.count(("Y-s0", 2)) == 1
    assert "Y-s0" not in [run.run.name for run in read_study(*read_registered(paths), paths).runs.values()]


def test_a_launch_that_leaves_no_result_is_not_counted(plan: StudyPlan, paths: StudyPaths) -> None:
    from tests.experiments.fakes import NoResult

    class Silent(FakeLauncher):
        def start(self, launch: LegLaunch):  # type: ignore[no-untyped-def]
            running = super().start(launch)
            return NoResult(self, launch, 0) if launch.run.name == "X-s1" else running

    outcome = run_study(plan, paths, Silent(paths), sleep=no_sleep)
    assert outcome.stopped == {"X-s1": "no usable result"}
    assert [entry.data["run"] for entry in read_journal(paths.journal).of_kind(EntryKind.EXPERIMENT_STOP)] == ["X-s1"]


def test_a_start_that_fails_leaves_everything_open(plan: StudyPlan, paths: StudyPaths) -> None:
    launcher = FakeLauncher(paths, lambda run, leg: 1 if run.arm == START else 0)
    outcome = run_study(plan, paths, launcher, sleep=no_sleep)
    assert launcher.started == [(START, 1)]
    assert len(outcome.open) == 6


def test_stopped_runs_are_tried_again_by_the_next_runner(plan: StudyPlan, paths: StudyPaths) -> None:
    broken = FakeLauncher(paths, lambda run, leg: int(run.name == "X-s1"))
    assert run_study(plan, paths, broken, sleep=no_sleep).stopped and broken.started.count(("X-s1", 1)) == 1
    again = FakeLauncher(paths)
    assert not run_study(plan, paths, again, sleep=no_sleep).stopped
    assert again.started == [("X-s1", 1)]


def test_launches_under_way_are_ended_when_the_runner_is_interrupted(plan: StudyPlan, paths: StudyPaths) -> None:
    class Endless(FakeLauncher):
        def start(self, launch: LegLaunch):  # type: ignore[no-untyped-def]
            running = super().start(launch)
            running.code = 0 if launch.run.arm == START else None  # type: ignore[assignment]
            return running

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    launcher = Endless(paths)
    with pytest.raises(KeyboardInterrupt):
        run_study(plan, paths, launcher, jobs=2, sleep=interrupt)
    assert launcher.stopped == ["X-s0", "Y-s0"]
    assert not run_study(plan, paths, FakeLauncher(paths), sleep=no_sleep).open


def test_a_run_whose_old_launch_is_still_ending_is_waited_for_and_not_stopped(plan: StudyPlan, paths: StudyPaths) -> None:
    """Found by killing a runner for real: its launches end within their grace; the next runner must not blame them."""
    launcher = FakeLauncher(paths, busy_polls={"X-s0": iter(range(30)), START: iter(range(3))})
    naps: list[float] = []
    outcome = run_study(plan, paths, launcher, sleep=naps.append)
    assert (outcome.stopped, outcome.open) == ({}, ())
    assert len(naps) >= 3


def test_a_run_that_another_runner_keeps_busy_is_left_to_it(plan: StudyPlan, paths: StudyPaths) -> None:
    said: list[str] = []
    launcher = FakeLauncher(paths, busy_polls={"X-s0": itertools.count()})
    outcome = run_study(plan, paths, launcher, sleep=lambda seconds: None, say=said.append)
    assert (outcome.stopped, outcome.open) == ({}, ("X-s0",))
    assert said[-1].startswith("X-s0: skipped, another runner has a live launch of it")


def test_two_runners_that_start_the_same_leg_at_once_stop_no_run(plan: StudyPlan, paths: StudyPaths) -> None:
    """Seen for real with three runners: the later `chronicle run` is refused, because the earlier one's launch is alive."""
    tries = itertools.count()

    def fate(run: StudyRun, leg: Leg) -> int:
        return 125 if (run.name, leg.number) == ("X-s0", 1) and next(tries) == 0 else 0

    launcher = FakeLauncher(paths, fate, busy_polls={"X-s0": itertools.chain([1], range(3))})
    started_as_free = launcher.is_free
    asked = itertools.count()
    launcher.is_free = lambda run: (run.name == "X-s0" and next(asked) == 0) or started_as_free(run)  # type: ignore[method-assign]
    outcome = run_study(plan, paths, launcher, sleep=lambda seconds: None)
    assert (outcome.stopped, outcome.open) == ({}, ())
    assert launcher.started.count(("X-s0", 1)) == 2
    assert counted(paths) == sorted(EVERY_LEG)


def test_another_plan_under_the_same_name_is_refused(plan: StudyPlan, paths: StudyPaths) -> None:
    run_study(plan, paths, FakeLauncher(paths), sleep=no_sleep)
    changed = plan_study(parse_study(STUDY.replace("title: small", "title: small\nmargin_bpb: 0.5")), "tiny")
    launcher = FakeLauncher(paths)
    with pytest.raises(NotRegistered, match="another registered plan"):
        run_study(changed, paths, launcher, sleep=no_sleep)
    assert launcher.started == []


def test_nothing_is_launched_when_the_registration_cannot_be_written(plan: StudyPlan, paths: StudyPaths) -> None:
    paths.study_dir.mkdir()
    (paths.study_dir / "journal").write_text("a file where a directory should be")
    launcher = FakeLauncher(paths)
    with pytest.raises((JournalError, OSError)):
        run_study(plan, paths, launcher, sleep=no_sleep)
    assert launcher.started == []


def test_only_the_asked_run_is_launched(plan: StudyPlan, paths: StudyPaths) -> None:
    """One SLURM array task: the start, or one run after it."""
    first = FakeLauncher(paths)
    run_study(plan, paths, first, only=[START], sleep=no_sleep)
    second = FakeLauncher(paths)
    run_study(plan, paths, second, only=["Y-s1"], sleep=no_sleep)
    assert (first.started, second.started) == ([(START, 1)], [("Y-s1", 1), ("Y-s1", 2)])


def test_next_launch_is_a_function_of_the_journal_alone(plan: StudyPlan, paths: StudyPaths) -> None:
    run_study(plan, paths, FakeLauncher(paths, lambda run, leg: int(run.name == "X-s1")), only=[START, "Y-s0", "X-s1"],
              sleep=no_sleep)  # fmt: skip
    history = read_history(read_journal(paths.journal).entries)
    assert {run.name: leg for run, leg in list_ready(plan, history)}["Z-s1"] == plan.run("Z-s1").legs[0]
    assert [run.name for run, _ in list_ready(plan, history)] == ["X-s0", "Z-s0", "X-s1", "Y-s1", "Z-s1"]
    assert [run.name for run, _ in list_ready(plan, history, {"X-s0"})] == ["Z-s0", "X-s1", "Y-s1", "Z-s1"]


def test_nothing_registered_is_said_with_the_way_out(paths: StudyPaths) -> None:
    with pytest.raises(NotRegistered, match="nothing is registered"):
        read_registered(paths)


def test_progress_is_told_per_launch(plan: StudyPlan, paths: StudyPaths) -> None:
    said: list[str] = []
    run_study(plan, paths, FakeLauncher(paths), jobs=1, say=said.append, sleep=no_sleep)
    assert len(said) == len(EVERY_LEG)
    assert said[0] == f"start: launch 1 of 1 done; 1 of {plan.num_launches} launches"
    assert said[-1].endswith(f"{plan.num_launches} of {plan.num_launches} launches")
