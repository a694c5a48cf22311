"""A real rollback by command, then a real resume under the guard: the contract is met, or the launch is refused."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.planted_bugs.schedulers import SCHEDULERS
from chronicle import ResumeRefused
from chronicle.cli.main import run as command
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from tests.guard.training import start


def roll_back(run_dir: Path, checkpoints: Path, *words: str) -> None:
    where = ["--run", run_dir.name, "--logs", str(run_dir.parent), "--checkpoints", str(checkpoints)]
    assert command(["rollback", "--to", "7", *words, "--yes", *where]) == 0


def last_verdict(run_dir: Path) -> dict[str, Any]:
    return dict([entry.data for entry in read_journal(RunPaths(run_dir)).of_kind("guard.verdict")][-1])


def lrs_of(launch: Any, num_steps: int) -> list[float]:
    seen = []
    for _ in range(num_steps):
        seen.append(float(launch.optimizer.param_groups[0]["lr"]))
        launch.train(1)
    return seen


@pytest.mark.parametrize("scheduler", ["LambdaLR", "CosineAnnealingLR", "OneCycleLR", "SequentialLR", "ExponentialLR"])
def test_halved_lr_is_met_from_the_first_step_on(run_dir: Path, checkpoint: Path, scheduler: str) -> None:
    """The guard holds the next launch to exactly half of what the LRs would have been."""
    launch = start(run_dir, scheduler=SCHEDULERS[scheduler])
    launch.train(7)
    launch.save(checkpoint)
    expected = [lr * 0.5 for lr in lrs_of(launch, 25)]
    launch.save(checkpoint.with_name("opt_step-32"))
    roll_back(run_dir, checkpoint.parent, "--lr-scale", "0.5")
    resumed = start(run_dir, seed=1, scheduler=SCHEDULERS[scheduler])
    resumed.accelerator.load_state(str(checkpoint))
    assert lrs_of(resumed, 25) == pytest.approx(expected, rel=1e-9)
    assert (last_verdict(run_dir)["verdict"], last_verdict(run_dir)["basis"]) == ("passed", "contract")
    assert not checkpoint.with_name("opt_step-32").exists()


def test_script_that_sets_the_old_lr_again_is_refused(run_dir: Path, checkpoint: Path) -> None:
    launch = start(run_dir)
    launch.train(7)
    launch.save(checkpoint)
    old = float(launch.optimizer.param_groups[0]["lr"])
    roll_back(run_dir, checkpoint.parent, "--lr-scale", "0.5")
    resumed = start(run_dir, seed=1)
    resumed.accelerator.load_state(str(checkpoint))
    resumed.optimizer.param_groups[0]["lr"] = old
    with pytest.raises(ResumeRefused):
        resumed.train(1)
    assert "did not reach memory" in next(c["cause"] for c in last_verdict(run_dir)["checks"] if c.get("cause"))


def test_launch_that_ignores_the_rollback_and_starts_fresh_is_refused(run_dir: Path, checkpoint: Path) -> None:
    launch = start(run_dir)
    launch.train(7)
    launch.save(checkpoint)
    roll_back(run_dir, checkpoint.parent, "--lr-scale", "0.5")
    with pytest.raises(ResumeRefused):
        start(run_dir, seed=1).train(1)
    assert str(checkpoint) in last_verdict(run_dir)["checks"][0]["expected"]
