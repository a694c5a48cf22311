"""A rig of the benchmark with and without the guard: save, go on, resume; the losses of every step. Also one rank of it.

`python -m tests.guard.both_ways RIG FOLDER` tells, as JSON, what this rank saw; under torchrun for more than one.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import torch.distributed

from benchmarks.planted_bugs.plan import Plan, Row
from benchmarks.planted_bugs.play import RIGS
from chronicle.launch.ranks import leave_group

Losses = list[tuple[int, float, float]]  # step, LR, loss


def train(rig_name: str, folder: Path, *, guarded: bool) -> Losses:
    """Everything random that a training has: dropout, shuffled data, and where there is one a batch norm's statistics."""
    plan = Plan(num_steps=50)
    if rig_name in ("torch", "lightning", "deepspeed"):
        plan.first["model"] = "dropout"
    if rig_name == "zero":
        plan.first["zero"] = 2
    run_dir = folder / "logs" / "run" if guarded else None
    rig = importlib.import_module(f"benchmarks.planted_bugs.{RIGS[rig_name]}")
    (folder / "saved").mkdir(parents=True, exist_ok=True)
    checkpoint, rows = rig.first(folder / "saved", run_dir, plan)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    again: list[Row] = []
    rig.resume(checkpoint, run_dir, plan, again)
    return [(step, values["lr"], values.get("loss", 0.0)) for step, values in (*rows, *again)]


def main() -> None:
    rig_name, folder = sys.argv[1], Path(sys.argv[2])
    if rig_name == "ddp":
        torch.distributed.init_process_group("gloo")
    else:
        from benchmarks.planted_bugs.rig_deepspeed import prepare_environment

        prepare_environment()
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    guarded = train(rig_name, folder / "guarded", guarded=True)
    bare = train(rig_name, folder / "bare", guarded=False)
    told = {"rank": torch.distributed.get_rank(), "steps": len(guarded), "equal": guarded == bare}
    os.write(1, (json.dumps(told) + "\n").encode())  # one write: ranks share this pipe
    torch.distributed.barrier()
    leave_group()


if __name__ == "__main__":
    main()
