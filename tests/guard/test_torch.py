"""A plain torch loop with one more line: memory travels inside the optimizer's state_dict."""

from pathlib import Path
from typing import Any

import pytest
import torch

import chronicle
from chronicle import ResumeRefused
from chronicle.journal import read_journal
from chronicle.paths import RunPaths


class Loop:
    """One launch of a loop as people write it."""

    def __init__(self, run_dir: Path | None, *, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=5, gamma=0.5)
        self.run = None
        if run_dir is not None:
            self.run = chronicle.attach(run_dir, self.model, self.optimizer, self.scheduler, **options)

    def train(self, num_steps: int, first: int = 0) -> list[float]:
        losses = []
        for step in range(first, first + num_steps):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            loss = self.model(x).square().mean()
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def save(self, path: Path) -> None:
        parts = ("model", "optimizer", "scheduler")
        torch.save({part: getattr(self, part).state_dict() for part in parts}, path)

    def load(self, path: Path, *parts: str) -> None:
        state = torch.load(path, weights_only=True)
        for part in parts or ("model", "optimizer", "scheduler"):
            getattr(self, part).load_state_dict(state[part])


@pytest.fixture
def saved(tmp_path: Path, run_dir: Path) -> tuple[Path, list[float]]:
    loop = Loop(run_dir)
    loop.train(7)
    loop.save(tmp_path / "step-7.pt")
    return tmp_path / "step-7.pt", loop.train(6, first=7)


def verdicts(run_dir: Path) -> list[dict[str, Any]]:
    return [dict(entry.data) for entry in read_journal(RunPaths(run_dir)).of_kind("guard.verdict")]


def test_healthy_resume_passes(saved: tuple[Path, list[float]], run_dir: Path) -> None:
    loop = Loop(run_dir, seed=1)
    loop.load(saved[0])
    assert loop.train(6, first=7) == saved[1]
    assert (verdicts(run_dir)[-1]["verdict"], verdicts(run_dir)[-1]["basis"]) == ("passed", "manifest")


def test_file_is_a_plain_one_that_loads_without_the_guard(saved: tuple[Path, list[float]]) -> None:
    loop = Loop(None, seed=1)
    loop.load(saved[0])
    assert loop.train(6, first=7) == saved[1]


@pytest.mark.parametrize("left_out", ["model", "optimizer", "scheduler"])
def test_part_that_was_not_loaded_is_refused(saved: tuple[Path, list[float]], run_dir: Path, left_out: str) -> None:
    loop = Loop(run_dir, seed=1)
    loop.load(saved[0], *({"model", "optimizer", "scheduler"} - {left_out}))
    with pytest.raises(ResumeRefused):
        loop.train(1, first=7)


def test_scheduler_built_after_the_load_is_refused(saved: tuple[Path, list[float]], run_dir: Path) -> None:
    """pytorch #65342: the constructor of the scheduler puts the group's LR back to its beginning."""
    loop = Loop(run_dir, seed=1)
    loop.load(saved[0])
    loop.scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, step_size=5, gamma=0.5)
    loop.optimizer.param_groups[0]["lr"] = loop.optimizer.param_groups[0]["initial_lr"]
    with pytest.raises(ResumeRefused):
        loop.train(1, first=7)


def test_scheduler_stepped_once_more_after_the_load_is_refused(saved: tuple[Path, list[float]], run_dir: Path) -> None:
    """slime PR #1547: files and the LR of this step are right, the position is not."""
    loop = Loop(run_dir, seed=1)
    loop.load(saved[0])
    loop.scheduler.step()
    with pytest.raises(ResumeRefused):
        loop.train(1, first=7)


def test_average_loaded_as_weights_is_refused_and_named(
    tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_average(seed: int) -> tuple[Loop, torch.nn.Module]:
        average = torch.nn.Linear(4, 2)
        loop = Loop(run_dir, seed=seed, averages={"ema": average})
        return loop, average

    loop, average = with_average(0)
    loop.train(7)
    loop.save(tmp_path / "step-7.pt")
    torch.save(average.state_dict(), tmp_path / "ema.pt")
    loop, average = with_average(1)
    loop.load(tmp_path / "step-7.pt")
    average.load_state_dict(torch.load(tmp_path / "ema.pt", weights_only=True))
    loop.model.load_state_dict(average.state_dict())
    with pytest.raises(ResumeRefused):
        loop.train(1, first=7)
    assert "these are the averaged weights `ema`" in capsys.readouterr().err


def test_run_that_loads_nothing_is_refused(saved: tuple[Path, list[float]], run_dir: Path) -> None:
    with pytest.raises(ResumeRefused):
        Loop(run_dir, seed=1).train(1)


def test_attached_loop_trains_bit_for_bit_as_without(run_dir: Path) -> None:
    assert Loop(run_dir).train(50) == Loop(None).train(50)


def test_log_writes_the_step_of_the_guard(tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from chronicle.metrics.log import read_metrics

    launch = {"CHRONICLE_LAUNCH_DIR": tmp_path / "launch", "CHRONICLE_RUN_DIR": run_dir, "CHRONICLE_RUN": "r"}
    for name, value in launch.items():
        monkeypatch.setenv(name, str(value))
    loop = Loop(run_dir)
    assert loop.run is not None
    loop.train(3)
    loop.run.log(loss=torch.tensor(0.5), note="text is no number")
    point = next(iter(read_metrics(tmp_path / "launch" / "metrics.jsonl")))
    assert (point.step, dict(point.values)) == (3, {"loss": 0.5})


def test_fewer_ranks_than_the_launcher_was_asked_for_are_refused_unless_accepted(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate launch --cpu --num_processes 2` starts one process in silence (seed 000)."""
    monkeypatch.setenv("CHRONICLE_REQUESTED_RANKS", "2")
    with pytest.raises(ResumeRefused) as refused:
        Loop(run_dir).train(1)
    assert [check.name for check in refused.value.checks if not check.ok] == ["ranks"]
    monkeypatch.setenv("CHRONICLE_ACCEPT_CHANGE", "world_size: one card is in repair")
    assert len(Loop(run_dir).train(1)) == 1
    monkeypatch.delenv("CHRONICLE_ACCEPT_CHANGE")
    monkeypatch.setenv("CHRONICLE_REQUESTED_RANKS", "1")
    assert len(Loop(run_dir).train(1)) == 1
