"""Real Accelerate training in this process: saves in the seed's layout, resumes, and tells the LR of every step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

import chronicle
from tests.rollback.lr_cases import lrs

HOW = ("prepared", "registered", "both")


@dataclass
class Training:
    """One process of one launch. `how` says whether the scheduler is prepared, registered for checkpointing, or both."""

    case: Callable[[torch.optim.Optimizer], Any]
    how: str = "registered"
    run_dir: Path | None = None  # with one, `chronicle.guard` watches over saves and loads
    honours: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        PartialState._reset_state()
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True)
        self.position = 0
        if self.run_dir is not None:
            chronicle.guard(self.accelerator, run_dir=self.run_dir, data_state=lambda: {"position": self.position},
                            honours=self.honours)  # fmt: skip
        model = torch.nn.Linear(4, 1)
        groups = [{"params": [model.weight], "lr": 1e-3}, {"params": [model.bias], "lr": 5e-4}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        scheduler = self.case(optimizer)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.scheduler = self.accelerator.prepare(scheduler) if self.how != "registered" else scheduler
        if self.how != "prepared":
            self.accelerator.register_for_checkpointing(scheduler)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.accelerator.backward(self.model(torch.ones(2, 4)).sum())
        self.optimizer.step()
        self.scheduler.step()
        self.position += 1

    def train(self, steps: int) -> list[tuple[float, ...]]:
        """The LRs that each of the next `steps` optimizer steps uses."""
        used = []
        for _ in range(steps):
            used.append(lrs(self.optimizer))
            self.step()
        return used

    def save(self, root: Path, step: int) -> Path:
        checkpoint = root / f"opt_step-{step}"
        self.accelerator.save_state(str(checkpoint / "accelerator_state"))
        return checkpoint

    def load(self, checkpoint: Path) -> None:
        self.position = int(checkpoint.name.rpartition("-")[2])
        self.accelerator.load_state(str(checkpoint / "accelerator_state"))


def make_run(
    root: Path,
    case: Callable[[Any], Any],
    how: str,
    steps: tuple[int, ...] = (10, 15, 20),
    run_dir: Path | None = None,
    honours: tuple[str, ...] = (),
) -> None:
    """Checkpoints at `steps` of a fresh training."""
    training, done = Training(case, how, run_dir, honours), 0
    for step in steps:
        training.train(step - done)
        training.save(root, step)
        done = step
    for thread in threading.enumerate():
        if thread.name == "chronicle-digests":  # a guard completes its manifests; at exit it does so by itself
            thread.join()


def used_lrs(
    checkpoint: Path, case: Callable[[Any], Any], how: str, steps: int = 21, run_dir: Path | None = None
) -> list[tuple[float, ...]]:
    """LRs that a fresh process really uses after loading `checkpoint`."""
    training = Training(case, how, run_dir)
    training.load(checkpoint)
    return training.train(steps)
