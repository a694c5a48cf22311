"""A small real training under Accelerate, built anew for every "launch" of a test."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

import chronicle

WARMUP_STEPS = 30


def warm_up(step: int) -> float:
    """LR factor: linear warm-up, then inverse square root."""
    return min((step + 1) / WARMUP_STEPS, (WARMUP_STEPS / (step + 1)) ** 0.5)


def lambda_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)


@dataclass
class Launch:
    """One start of a training process, in this process."""

    accelerator: Any
    model: Any
    optimizer: Any
    scheduler: Any
    steps: int = 0

    def train(self, num_steps: int) -> list[float]:
        """Losses of the next steps; the data comes from torch's generator, so a lost RNG state shows in them."""
        losses = []
        for _ in range(num_steps):
            x = torch.randn(4, 8)
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            self.optimizer.zero_grad()
            self.accelerator.backward(loss)
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.steps += 1
            losses.append(loss.item())
        return losses

    def save(self, directory: Path) -> Path:
        self.accelerator.save_state(str(directory))
        if hasattr(self.accelerator, "chronicle"):
            self.accelerator.chronicle.sealer.finish()
        return directory


def start(
    run_dir: Path | None,
    *,
    seed: int = 0,
    scheduler: Callable[[Any], Any] | None = lambda_lr,
    prepare_scheduler: bool = True,
    register_scheduler: bool = False,
    optimizer: Callable[[Any], Any] = lambda params: torch.optim.AdamW(params, lr=1e-2),
    model: Callable[[], Any] | None = None,
    accelerator_options: dict[str, Any] | None = None,
    **guard_options: Any,
) -> Launch:
    """A launch with fresh objects; `run_dir` None: without the guard."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()
    torch.manual_seed(seed)
    accelerator = Accelerator(cpu=True, **(accelerator_options or {}))
    if run_dir is not None:
        accelerator = chronicle.guard(accelerator, run_dir=run_dir, **guard_options)
    network = (model or small_model)()
    optim = optimizer(network.parameters())
    sched = scheduler(optim) if scheduler is not None else None
    network, optim = accelerator.prepare(network, optim)
    if sched is not None and prepare_scheduler:
        sched = accelerator.prepare(sched)
    if sched is not None and register_scheduler:
        accelerator.register_for_checkpointing(sched)
    return Launch(accelerator=accelerator, model=network, optimizer=optim, scheduler=sched)


def small_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
