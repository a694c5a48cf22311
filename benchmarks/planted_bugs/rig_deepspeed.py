"""A raw DeepSpeed engine, ZeRO on one CPU rank with gloo; everything lies in `global_step12/`."""

import os
from pathlib import Path
from typing import Any

import torch

from benchmarks.planted_bugs.models import MODELS
from benchmarks.planted_bugs.plan import Plan, Row
from benchmarks.planted_bugs.schedulers import SCHEDULERS

__all__ = ["first", "resume"]

SAVED_AT = 12
NUM_FIRST = 40


class EngineLaunch:
    """One start of the script."""

    def __init__(self, run_dir: Path | None, options: dict[str, Any]) -> None:
        import deepspeed

        import chronicle

        self.options = o = {"scheduler": "LambdaLR", "zero": 1, "accumulation": 1, "model": "plain", **options}
        if not torch.distributed.is_initialized():
            deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        torch.manual_seed(0)
        model = MODELS[o["model"]]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = SCHEDULERS[o["scheduler"]](optimizer) if o["scheduler"] else None
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": o["accumulation"],
            "zero_optimization": {"stage": o["zero"]},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
        if run_dir is not None:
            chronicle.guard(self.engine, run_dir=run_dir)

    def train(self, num_steps: int, rows: list[Row], plan: Plan | None = None) -> None:
        for _ in range(num_steps):
            step = int(self.engine.global_steps)
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 + step))
            loss = (self.engine(x) - x.sum(1, keepdim=True)).square().mean()
            self.engine.backward(loss)
            if plan is not None and len(rows) + 1 in plan.at_step:
                plan.at_step[len(rows) + 1](self)
            lr = float(self.engine.optimizer.param_groups[0]["lr"])
            self.engine.step()
            rows.append((int(self.engine.global_steps), {"lr": lr, "loss": float(loss.detach())}))


def first(folder: Path, run_dir: Path | None, plan: Plan) -> tuple[Path, list[Row]]:
    """Save at step 12, go on to step 40."""
    launch, rows = EngineLaunch(run_dir, plan.first), []
    launch.train(SAVED_AT, rows)
    root = folder / "checkpoints"
    launch.engine.save_checkpoint(str(root))
    if run_dir is not None:
        launch.engine.chronicle.sealer.finish()
    if plan.first.get("saves_again"):
        launch.train(SAVED_AT, rows)
        launch.engine.save_checkpoint(str(root))
        if run_dir is not None:
            launch.engine.chronicle.sealer.finish()
    launch.train(NUM_FIRST - int(launch.engine.global_steps), rows)
    return root / f"global_step{SAVED_AT}", rows


def resume(checkpoint: Path, run_dir: Path | None, plan: Plan, rows: list[Row]) -> None:
    """The launch that resumes."""
    launch = EngineLaunch(run_dir, {**plan.first, **plan.again})
    if plan.again.get("load", True):
        launch.engine.load_checkpoint(str(checkpoint.parent), **plan.again.get("load_options", {}))
    for hook in plan.after_load:
        hook(launch)
    launch.train(plan.num_steps, rows, plan)


def prepare_environment() -> None:
    """One rank without a launcher; port 0 lets the store pick a free one."""
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in {"DS_ACCELERATOR": "cpu", **defaults}.items():
        os.environ.setdefault(name, value)
