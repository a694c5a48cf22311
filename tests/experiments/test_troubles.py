"""Troubles in mid-study, for real: a launch killed, a disk full, a run without data. Each stops its run; the rest goes on."""

import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from chronicle.journal import read_journal
from chronicle.journal.events import EntryKind
from experiments.definition import parse_study
from experiments.design import START, plan_study
from experiments.files import StudyPaths
from experiments.launches import LegLaunch
from experiments.outcomes import read_study
from experiments.runner import ChronicleLauncher, Running, read_registered, run_study

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STUDY = """
v: 1
name: troubles
title: What happens to a study when something breaks?
trainer:
  command: ["{python}", -m, experiments.trainer, --begin, "{begin}", --first, "{first}", --seed, "{seed}",
            --positions, "{data}", --checkpoints, "{checkpoints}", --stop-at, "{last}", --recipe, modern,
            --set, "total_steps={total}",
            --set, d_model=12, --set, d_ff=16, --set, num_layers=1, --set, window_bytes=16, --set, data.batch_size=4,
            --set, warmup_steps=4, --set, decay_steps=0, --set, eval_every=64, --set, eval_windows=8, --set, "data_dir={text}"]
  resume: [--resume, "{resume}"]
  checkpoint: opt_step-{step}
  settings: {text: none}
  loss: loss_bpb
  outcome: eval_bpb
reference: base
gate: [base, exact]
arms:
  base:    {slices: [1, 2]}
  exact:   {slices: [1, 2], restart: {}}
  killed:  {slices: [1, 2], restart: {}}
  full:    {slices: [1, 2], restart: {}}
  starved: {slices: [1, 2], restart: {set: {text: /nowhere}}}
contrasts: {}
profiles:
  tiny: {start_updates: 8, slice_updates: 64, seeds: 1, arms: [base, killed, full, starved], once: [exact]}
"""


@dataclass
class KilledOnTheWay:
    """A launch whose trainer gets KILL as soon as it trains."""

    running: Running
    pid: int
    metrics: Path
    killed: bool = False

    def poll(self) -> int | None:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        with suppress(OSError):
            if not self.killed and self.metrics.is_file():
                os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
                self.killed = True
        return self.running.poll()

    def __getattr__(self, name: str) -> object:
        return getattr(self.running, name)


class Troubled(ChronicleLauncher):
    """Kills launch 2 of `killed`, and gives `full` a disk that holds no checkpoint, until told that all is well."""

    well = False

    def start(self, launch: LegLaunch) -> Running:
        running = super().start(launch)
        if self.well or (launch.run.arm, launch.leg.number) != ("killed", 2):
            return running
        return KilledOnTheWay(running, running.process.pid, self.paths.run(launch.run.name).metrics_path(2))  # type: ignore[attr-defined, return-value]


@pytest.fixture(scope="module")
def full_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StudyPaths]:
    """A study in which the checkpoints of `full` lie on a file system of 64 kB."""
    paths = StudyPaths(tmp_path_factory.mktemp("troubles") / "study")
    disk = paths.checkpoints_dir("full-s0")
    disk.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("a file system of 64 kB can only be mounted by root")
    yield paths
    subprocess.run(["umount", "--lazy", str(disk)], check=False)


def test_a_killed_launch_a_full_disk_and_a_run_without_data_stop_their_runs_alone(full_disk: StudyPaths) -> None:
    paths, plan = full_disk, plan_study(parse_study(STUDY), "tiny")
    launcher = Troubled(paths, dict(os.environ))
    outcome = run_study(plan, paths, launcher, jobs=2)
    assert outcome.complete == (START, "base-s0", "exact-s0")
    assert outcome.stopped["killed-s0"] == "killed by SIGKILL"
    assert outcome.stopped["full-s0"].startswith("ended with code 1: ")
    assert outcome.stopped["starved-s0"].startswith("ended with code 1: ") and "/nowhere" in outcome.stopped["starved-s0"]
    assert outcome.open == ()

    subprocess.run(["mount", "-o", "remount,size=64m", str(paths.checkpoints_dir("full-s0"))], check=True)
    launcher.well = True
    again = run_study(plan, paths, launcher, jobs=2)
    assert set(again.stopped) == {"starved-s0"}  # the text is not there yet
    entries = read_journal(paths.journal)
    stopped = Counter(entry.data["run"] for entry in entries.of_kind(EntryKind.EXPERIMENT_STOP))
    legs = Counter((entry.data["run"], entry.data["leg"]) for entry in entries.of_kind(EntryKind.EXPERIMENT_LEG))
    assert stopped == {"killed-s0": 1, "full-s0": 1, "starved-s0": 2} and max(legs.values()) == 1
    data = read_study(*read_registered(paths), paths)
    losses = {run.run.arm: run.channels["loss"].tolist() for run in data.runs.values()}
    assert set(losses) == {"base", "exact", "killed", "full"}
    assert all(curve == losses["base"] for curve in losses.values())  # killed on the way, and still bit for bit
    assert len(set(losses["base"])) == 128


def test_a_disk_that_is_full_for_the_study_itself_is_one_sentence_and_is_gone_on_with_later(tmp_path: Path) -> None:
    """No file may grow: the runner's own journal cannot be written. Nothing is launched, nothing is lost."""
    study = tmp_path / "troubles.yaml"
    study.write_text(STUDY)
    words = [sys.executable, "-m", "chronicle.cli.main", "experiment", "run", str(study), "--profile", "tiny",
             "--only", "start", "--logs", str(tmp_path / "logs")]  # fmt: skip
    none = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # noqa: E731
    done = subprocess.run(words, capture_output=True, text=True, preexec_fn=none)
    said = [line.partition(": ")[0] for line in done.stderr.splitlines()]
    assert (done.returncode, said) == (1, ["error", "hint"]), done.stderr
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 of 6 runs complete" in done.stdout
