"""One rank of `test_twice.py`: trains without a check, with one, and with one while rank 1 computes a number wrongly."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import chronicle
from chronicle.launch.ranks import leave_group
from tests.guard.test_twice import EVERY, FAULTY, NUM_STEPS, Deep, Fault

RUN_DIR, HOW = Path(sys.argv[1]), sys.argv[3]


def train(run_dir: Path | None, fault: Fault) -> str:
    """Returns the weights in words."""
    torch.manual_seed(0)
    inner = Deep()
    inner.first.register_forward_hook(fault.in_output)
    model: Any = inner
    if HOW == "fsdp2":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(inner.first, mesh=mesh)
        fully_shard(inner, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attached = None if run_dir is None else chronicle.attach(run_dir, model, optimizer, check_steps=EVERY)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for fault.step in range(1, NUM_STEPS + 1):
        x = torch.randn(6, 8, generator=generator)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if attached is not None:
        attached.session.retire()
    return " ".join(f"{float(getattr(p, '_local_tensor', p).double().sum()):.17g}" for p in model.parameters())


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for act, run_dir, at in (("alone", None, 0), ("healthy", RUN_DIR.with_name("healthy"), 0), ("faulty", RUN_DIR, FAULTY)):
        told = train(run_dir, Fault(at if rank == 1 else 0))
        sys.stdout.write(json.dumps({"act": act, "rank": rank, "told": told}) + "\n")
        sys.stdout.flush()
    leave_group()
