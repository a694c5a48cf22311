"""A tiny training run under Accelerate that saves one checkpoint; the script that builders start once per rank.

Usage: accelerate_run.py OUT '{"steps": 10, "scheduler": "prepare", …}'. Started by `checkpoints.py` directly for one
process and through torchrun for more: `accelerate launch --cpu --num_processes 2` starts one process in silence.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

from chronicle.launch.ranks import leave_group


class Counter:
    """A registered object that is no scheduler."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]


def make_scheduler(optimizer: torch.optim.Optimizer, kind: str) -> Any:
    from torch.optim import lr_scheduler as lr

    if kind == "lambda":
        return lr.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 100))
    if kind == "cosine":
        return lr.CosineAnnealingLR(optimizer, T_max=100, eta_min=1e-5)
    if kind == "onecycle":
        return lr.OneCycleLR(optimizer, max_lr=1e-2, total_steps=200)
    raise SystemExit(f"no scheduler called {kind}")


def main(out: Path, options: dict[str, Any]) -> None:
    automatic = options.get("automatic", False)
    project = ProjectConfiguration(project_dir=str(out), automatic_checkpoint_naming=automatic)
    accelerator = Accelerator(cpu=True, project_config=project)
    if accelerator.num_processes != options.get("processes", 1):
        raise SystemExit(f"{accelerator.num_processes} processes instead of {options.get('processes', 1)}")
    set_seed(options.get("seed", 0), device_specific=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 5e-4}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = make_scheduler(optimizer, options.get("kind", "lambda"))
    where = options.get("scheduler", "prepare")
    model, optimizer = accelerator.prepare(model, optimizer)
    raw = scheduler
    if where in ("prepare", "both"):
        scheduler = accelerator.prepare(scheduler)
    if where in ("register", "both"):
        accelerator.register_for_checkpointing(raw)
    counter = Counter()
    if options.get("counter"):
        accelerator.register_for_checkpointing(counter)
    for step in range(1, options.get("steps", 10) + 1):
        loss = model(torch.randn(3, 4)).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        if where != "none":
            scheduler.step()
        optimizer.zero_grad()
        counter.samples += 3
        if step in options.get("save_at", [options.get("steps", 10)]):
            accelerator.save_state(None if automatic else str(out / options.get("folder", "").format(step=step)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    if torch.distributed.is_initialized():  # ranks that just leave may abort while gloo's threads still run
        leave_group()
