"""An asynchronous save of torch's distributed checkpoint holds the state with which it began, whenever it is told."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import async_save  # a name that was imported before the guard
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import chronicle
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from rollback.checkpoint.manifest import MANIFEST_NAME


class Loop:
    """One start of the script."""

    def __init__(self, top: Path) -> None:
        self.root, self.step = top / "checkpoints", 0
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.run = chronicle.attach(top / "logs" / "late", self.model, self.optimizer, self.scheduler)

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(self.step))
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def load(self, step: int) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=self.root / f"step-{step}")
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = step

    def finish(self) -> None:
        self.run.session.sealer.finish()


@pytest.mark.parametrize("by_writer", [False, True])
def test_a_save_that_is_told_late_is_of_the_step_at_which_it_began(tmp_path: Path, by_writer: bool) -> None:
    loop = Loop(tmp_path)
    loop.train(3)
    path = loop.root / "step-3"
    where: dict[str, Any] = {"storage_writer": dcp.FileSystemWriter(path)} if by_writer else {"checkpoint_id": str(path)}
    future: Any = async_save(loop.state(), **where)
    loop.train(2)
    future.result()
    loop.run.saved(path)
    loop.train(1)
    loop.finish()
    saved = list(read_journal(RunPaths(tmp_path / "logs" / "late")).of_kind("checkpoint"))
    assert [entry.step for entry in saved] == [3] and (path / MANIFEST_NAME).is_file()

    again = Loop(tmp_path)
    again.load(3)
    again.train(2)
    verdict = list(read_journal(RunPaths(tmp_path / "logs" / "late")).of_kind("guard.verdict"))[-1].data
    assert verdict["verdict"] == "passed", verdict
    assert verdict["loaded"]["id"] == saved[0].data["identity"], "known by its weights"
    again.finish()


def test_what_was_written_over_an_asynchronous_save_is_of_its_own_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.train(3)
    future: Any = async_save(loop.state(), checkpoint_id=loop.root / "newest")
    future.result()  # and nobody tells it
    loop.train(2)
    dcp.save(loop.state(), checkpoint_id=loop.root / "newest")
    loop.run.saved(loop.root / "newest")
    loop.finish()
    assert [entry.step for entry in read_journal(RunPaths(tmp_path / "logs" / "late")).of_kind("checkpoint")] == [5]


def test_a_save_that_is_told_at_once_is_as_before(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.train(2)
    dcp.save(loop.state(), checkpoint_id=loop.root / "step-2")
    loop.run.saved(loop.root / "step-2")
    loop.train(1)
    loop.finish()
    assert [entry.step for entry in read_journal(RunPaths(tmp_path / "logs" / "late")).of_kind("checkpoint")] == [2]
