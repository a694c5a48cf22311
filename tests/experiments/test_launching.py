"""How a launch is started and how its end is told: the command line, the checkpoint it loads, the reason it stopped."""

import itertools
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.definition import find_study
from experiments.design import START, StudyPlan, plan_study
from experiments.errors import StudyError
from experiments.files import StudyPaths
from experiments.launches import LegLaunch
from experiments.runner import ChronicleLauncher, Running


@pytest.fixture
def plan() -> StudyPlan:
    return plan_study(find_study("restart-impact"), "ci")


@pytest.fixture
def launcher(tmp_path: Path) -> ChronicleLauncher:
    return ChronicleLauncher(StudyPaths(tmp_path / "study"), {"PATH": "/usr/bin", "CHRONICLE_GUARD": "off"})


def ended(launcher: ChronicleLauncher, plan: StudyPlan, said: str, code: int = 0) -> Running:
    run = plan.run("B-s0")
    output = launcher.paths.output_path(run.name, 1)
    output.parent.mkdir(parents=True)
    output.write_text(said)
    process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
    process.wait()
    return Running(process, LegLaunch(plan, run, run.legs[0], launcher.paths), output)


def test_every_launch_goes_through_chronicle_run(plan: StudyPlan, launcher: ChronicleLauncher) -> None:
    run = plan.run("B-s0")
    command = launcher.command(LegLaunch(plan, run, run.legs[1], launcher.paths))
    assert command[1:4] == ["-m", "chronicle.cli.main", "run"]
    trainer = command[command.index("--") + 1 :]
    assert trainer[1:3] == ["-m", "experiments.trainer"]
    told = {word: value for word, value in itertools.pairwise(trainer) if word.startswith("--")}
    assert (told["--first"], told["--stop-at"], told["--positions"], told["--order"]) == ("40", "50", "40:50", "1")


def test_a_first_leg_loads_the_start_and_later_ones_their_own_run(plan: StudyPlan, launcher: ChronicleLauncher) -> None:
    paths, start = launcher.paths, plan.profile.start_updates
    first, second = plan.run("B-s0").legs[:2]
    assert LegLaunch(plan, plan.run(START), plan.run(START).legs[0], paths).resume_path is None
    own = paths.checkpoints_dir("B-s0") / f"opt_step-{start + 10}"
    assert LegLaunch(plan, plan.run("B-s0"), second, paths).resume_path == own
    common = paths.checkpoints_dir(START) / f"opt_step-{start}"
    assert LegLaunch(plan, plan.run("B-s0"), first, paths).resume_path == common


@pytest.mark.parametrize(
    ("code", "said", "told"),
    [
        (137, "", "killed by SIGKILL"),
        (-signal.SIGTERM, "", "killed by SIGTERM"),
        (78, "error: resume refused before load: stray", "refused by the guard: resume refused before load: stray"),
        (1, "noise\nerror: no data for `B-s0`: too short\nmore", "ended with code 1: no data for `B-s0`: too short"),
        (1, "Traceback\n  File x\nOSError: [Errno 28] No space left on device\nchronicle: launch 1 failed",
         "ended with code 1: OSError: [Errno 28] No space left on device"),
        (125, "error: preflight PF30 stray files: x", "not started: preflight PF30 stray files: x"),
        (1, "chronicle: all is quiet", "ended with code 1: no message"),
    ],
)  # fmt: skip
def test_the_reason_of_a_failed_launch_is_its_own_last_word(
    plan: StudyPlan, launcher: ChronicleLauncher, code: int, said: str, told: str
) -> None:
    assert ended(launcher, plan, said).explain(code) == told


def test_a_launch_that_ended_well_without_a_result_is_an_error(plan: StudyPlan, launcher: ChronicleLauncher) -> None:
    with pytest.raises(StudyError, match="no launch in its journal"):
        ended(launcher, plan, "").finish()


def test_a_free_run_is_free(plan: StudyPlan, launcher: ChronicleLauncher) -> None:
    assert launcher.is_free(plan.run("B-s0"))
