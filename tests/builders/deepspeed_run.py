"""A tiny DeepSpeed training run on CPU ranks (gloo) that saves one checkpoint, alone or under Accelerate.

Usage: deepspeed_run.py OUT '{"stage": 2, "accelerate": true, "scheduler": "client", "steps": 10}'.
A client `torch.optim.AdamW` keeps DeepSpeed from compiling its own optimizers; what is stored is the same layout.
Under Accelerate the backend must be named, or every rank believes to be alone (and all write the same files).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch

from chronicle.launch.ranks import leave_group

# The shared-memory collectives would be compiled for minutes on first use; gloo does without them.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

CONFIG_SCHEDULERS: dict[str, Any] = {
    "WarmupLR": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 5, "warmup_type": "linear"},
    "WarmupDecayLR": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 5, "total_num_steps": 100},
    "WarmupCosineLR": {"total_num_steps": 100, "warmup_num_steps": 5},
}


def config_of(options: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {"stage": options.get("stage", 1)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if options.get("bf16"):
        config["bf16"] = {"enabled": True}
    if options.get("universal"):
        config["checkpoint"] = {"load_universal": True}
    kind = options.get("scheduler", "client")
    if kind in CONFIG_SCHEDULERS:
        config["scheduler"] = {"type": kind, "params": CONFIG_SCHEDULERS[kind]}
    return config


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 5e-4}]
    return model, torch.optim.AdamW(groups, lr=1e-3)


def scheduler_for(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 100))


def loss_of(engine: Any, options: dict[str, Any]) -> torch.Tensor:
    x = torch.randn(3, 4, dtype=torch.bfloat16 if options.get("bf16") else torch.float32)
    return engine(x).float().pow(2).mean()


def raw(out: Path, options: dict[str, Any]) -> None:
    """`engine.save_checkpoint`, with `latest` and client state."""
    deepspeed.init_distributed("gloo")
    model, optimizer = model_and_optimizer()
    client = options.get("scheduler", "client") == "client"
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=config_of(options),
        lr_scheduler=scheduler_for if client else None,
    )
    if options.get("resume"):
        resume(engine, out, options)
        return
    for step in range(1, options.get("steps", 10) + 1):
        engine.backward(loss_of(engine, options))
        engine.step()
        if step in options.get("save_at", [options.get("steps", 10)]):
            engine.save_checkpoint(str(out), client_state={"iteration": step})


def resume(engine: Any, out: Path, options: dict[str, Any]) -> None:
    """Load what `latest` (or `latest_universal`) names, and write the LRs of the next steps beside OUT."""
    if engine.load_checkpoint(str(out))[0] is None:
        raise SystemExit("nothing was loaded")
    used = []
    for _ in range(4):
        used.append([float(group["lr"]) for group in engine.optimizer.param_groups])
        engine.backward(loss_of(engine, options))
        engine.step()
    if engine.global_rank == 0:
        (out.parent / "used.json").write_text(json.dumps(used))


def under_accelerate(out: Path, options: dict[str, Any]) -> None:
    """`accelerator.save_state` into `opt_step-N/accelerator_state`, the layout of the seed."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DistributedType, DummyScheduler, InitProcessGroupKwargs

    config = config_of(options)
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    # With cpu=True Accelerate would ignore the plugin in silence and make DDP files.
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    world = accelerator.num_processes
    if world != options.get("processes", 1) or accelerator.distributed_type is not DistributedType.DEEPSPEED:
        raise SystemExit(f"{accelerator.distributed_type} on {world} ranks is no DeepSpeed run")
    model, optimizer = model_and_optimizer()
    kind = options.get("scheduler", "client")
    scheduler: Any = scheduler_for(optimizer) if kind in ("client", "register") else DummyScheduler(optimizer)
    if kind == "register":
        accelerator.register_for_checkpointing(scheduler)
        engine, optimizer = accelerator.prepare(model, optimizer)
    else:
        engine, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(options.get("steps", 10)):
        accelerator.backward(loss_of(engine, options))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state(str(out / f"opt_step-{options.get('steps', 10)}" / "accelerator_state"))


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    (under_accelerate if given.get("accelerate") else raw)(Path(sys.argv[1]), given)
    if torch.distributed.is_initialized():  # ranks that just leave may abort while gloo's threads still run
        leave_group()
