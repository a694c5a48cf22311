"""A real rollback by command, then a real resume under the guard: the contract is met, or the launch is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

import chronicle
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


# --- accepted without proof: a loop that computes its LR itself, so that the edit of the file is overwritten


class Loop:
    """A plain torch loop that saves no scheduler; `base` is the LR that its command gives it."""

    def __init__(self, run_dir: Path, base: float) -> None:
        torch.manual_seed(0)
        self.model, self.base, self.step = torch.nn.Linear(4, 2), base, 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=base)
        chronicle.attach(run_dir, self.model, self.optimizer)

    def train(self, num_steps: int, *, sets: bool = True, back_to: tuple[int, float] = (0, 0.0)) -> None:
        for _ in range(num_steps):
            if sets:
                self.optimizer.param_groups[0]["lr"] = self.base * 0.99**self.step
            if back_to[0] and self.step >= back_to[0]:
                self.optimizer.param_groups[0]["lr"] = back_to[1]
            self.model(torch.randn(8, 4)).square().mean().backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def save(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        torch.save(state, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


@pytest.fixture
def accepted(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A checkpoint whose LR was halved although no scheduler was saved."""
    path = tmp_path / "checkpoints" / "step-7.pt"
    launch = Loop(run_dir, 1e-2)
    launch.train(7)
    launch.save(path)
    where = ["--run", run_dir.name, "--logs", str(run_dir.parent), "--checkpoints", str(path.parent)]
    assert command(["rollback", "--to", "7", "--lr-scale", "0.5", "--yes", *where]) == 3
    assert "no scheduler was saved" in capsys.readouterr().err
    roll_back(run_dir, path.parent, "--lr-scale", "0.5", "--accept-unproved", "the next launch has --lr 5e-3")
    return path


def test_a_launch_with_the_accepted_lr_trains_on(run_dir: Path, accepted: Path) -> None:
    resumed = Loop(run_dir, 5e-3)
    resumed.load(accepted)
    resumed.train(60)
    assert (last_verdict(run_dir)["basis"], resumed.step) == ("contract", 67)
    assert last_verdict(run_dir)["verdict"] != "refused"


def test_a_launch_that_was_given_the_old_lr_makes_no_step(run_dir: Path, accepted: Path) -> None:
    resumed = Loop(run_dir, 1e-2)
    resumed.load(accepted)
    with pytest.raises(ResumeRefused):
        resumed.train(1)
    assert resumed.step == 7


@pytest.mark.parametrize(("at", "trips"), [(20, True), (56, True), (57, False)])
def test_the_old_lr_ends_the_launch_within_its_first_fifty_steps(run_dir: Path, accepted: Path, at: int, trips: bool) -> None:
    resumed = Loop(run_dir, 5e-3)
    resumed.load(accepted)
    if trips:
        with pytest.raises(ResumeRefused):
            resumed.train(60, back_to=(at, 1e-2))
        assert resumed.step == at
    else:
        resumed.train(60, back_to=(at, 1e-2))
