"""DeepSpeed's own schedulers, every one in one process: train and save, or resume and tell the LRs that are then used.

Usage: deepspeed_own_run.py OUT '{"kinds": ["WarmupLR"], "resume": false}'. Each kind has OUT/<kind>/ds.json, its
checkpoints in OUT/<kind>/checkpoints, and after a resume OUT/<kind>/used.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from deepspeed_run import config_of, deepspeed, loss_of, model_and_optimizer
from deepspeed_run import torch as _torch

from chronicle.launch.ranks import leave_group

NUM_STEPS, NUM_AFTER = 10, 8

PARAMS: dict[str, dict[str, object]] = {
    "WarmupLR": {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": 14, "warmup_type": "linear"},
    "WarmupDecayLR": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 5, "total_num_steps": 100},
    "WarmupCosineLR": {"total_num_steps": 100, "warmup_num_steps": 5},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 12, "cycle_momentum": False},
    "LRRangeTest": {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 5},
}


def write_config(folder: Path, kind: str) -> None:
    """As a person writes it: their own order and indentation."""
    config = config_of({"stage": 1})
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config["scheduler"] = {"type": kind, "params": PARAMS[kind]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ds.json").write_text(json.dumps(config, indent=3) + "\n")


def train(folder: Path, *, resume: bool) -> None:
    """Ten steps and a save, or the LRs of eight steps after a load."""
    model, _ = model_and_optimizer()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=str(folder / "ds.json")
    )
    if resume and engine.load_checkpoint(str(folder / "checkpoints"))[0] is None:
        raise SystemExit("nothing was loaded")
    used = []
    for _ in range(NUM_AFTER if resume else NUM_STEPS):
        used.append([float(group["lr"]) for group in engine.optimizer.param_groups])
        engine.backward(loss_of(engine, {}))
        engine.step()
    if resume:
        (folder / "used.json").write_text(json.dumps(used))
    else:
        engine.save_checkpoint(str(folder / "checkpoints"))


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    deepspeed.init_distributed("gloo")
    for name in given["kinds"]:
        if not given.get("resume"):
            write_config(Path(sys.argv[1]) / name, name)
        _torch.manual_seed(0)
        train(Path(sys.argv[1]) / name, resume=bool(given.get("resume")))
    if _torch.distributed.is_initialized():  # ranks that just leave may abort while gloo's threads still run
        leave_group()
