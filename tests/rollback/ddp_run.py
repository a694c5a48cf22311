"""Two real ranks under torchrun (gloo): trains and saves, or loads and prints the LRs it then uses.

Usage: torchrun --nproc_per_node 2 ddp_run.py save|load ROOT STEP prepared|registered CASE
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator

from tests.rollback.lr_cases import COMPUTED, FUNCTIONS, lrs

warnings.simplefilter("ignore")


def main(action: str, root: Path, step: int, how: str, case: str) -> None:
    accelerator = Accelerator(cpu=True)
    if accelerator.num_processes != 2:
        raise SystemExit(f"{accelerator.num_processes} processes, expected 2")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    groups = [{"params": [model.weight], "lr": 1e-3}, {"params": [model.bias], "lr": 5e-4}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = (COMPUTED | FUNCTIONS)[case](optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    if how == "prepared":
        scheduler = accelerator.prepare(scheduler)
    else:
        accelerator.register_for_checkpointing(scheduler)
    checkpoint = root / f"opt_step-{step}" / "accelerator_state"
    if action == "load":
        accelerator.load_state(str(checkpoint))
    used = []
    for _ in range(step if action == "save" else 21):
        used.append(lrs(optimizer))
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        scheduler.step()
    if action == "save":
        accelerator.save_state(str(checkpoint))
    print(f"RANK {accelerator.process_index} " + json.dumps(used), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
