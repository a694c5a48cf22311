"""Accelerate, on one process, on two gloo ranks (DDP), and with DeepSpeed ZeRO: a script with loader, EMA and skip."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, InitProcessGroupKwargs

import chronicle
from benchmarks.planted_bugs.models import MODELS, split_parameters
from benchmarks.planted_bugs.plan import Plan, Row
from benchmarks.planted_bugs.schedulers import SCHEDULERS

__all__ = ["SAVED_AT", "AccelerateLaunch", "first", "resume"]

SAVED_AT = 12
NUM_FIRST = 40
EPOCH_BATCHES = 220


class Counter:
    """An object of the script's own that is saved: the update counter of an average with a warm-up."""

    def __init__(self) -> None:
        self.updates = 0

    def state_dict(self) -> dict[str, int]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.updates = state["updates"]


class AccelerateLaunch:
    """One start of the script. Attributes are what causes reach into."""

    def __init__(self, run_dir: Path | None, options: dict[str, Any]) -> None:
        o = {
            "scheduler": "LambdaLR",
            "prepare": True,
            "register": False,
            "accumulation": 1,
            "batch": 4,
            "optimizer": "AdamW",
            "zero": 0,
            "seed": 0,
            "prepared": True,
            "model": "dropout",
            **options,
        }
        self.options = o
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        PartialState._reset_state()
        random.seed(o["seed"])
        np.random.seed(o["seed"])
        torch.manual_seed(o["seed"])
        # `cpu=True` would choose DDP over DeepSpeed, in silence
        self.accelerator: Any = Accelerator(cpu=not o["zero"], **_accelerator_options(o))
        if run_dir is not None:
            chronicle.guard(self.accelerator, run_dir=run_dir, same_data=True, accept_change=o.get("accept", {}))
        self.rank = int(self.accelerator.process_index)
        self.model: Any = MODELS[o["model"]]()
        self.model.to(o.get("dtype", torch.float32))
        self.optimizer: Any = _optimizer(self.model, o)
        self.scheduler: Any = SCHEDULERS[o["scheduler"]](self.optimizer) if o["scheduler"] else None
        generator = torch.Generator().manual_seed(o.get("data_seed", 7))
        inputs = torch.randn(EPOCH_BATCHES * 4 * self.accelerator.num_processes, 8, generator=generator)
        rows = torch.utils.data.TensorDataset(inputs)
        shuffle, workers = o.get("shuffle", True), o.get("workers", 0)
        self.loader: Any = torch.utils.data.DataLoader(rows, o["batch"], shuffle=shuffle, num_workers=workers)
        if o.get("evaluation"):
            self.accelerator.prepare(torch.utils.data.DataLoader(rows, 2 * o["batch"]))
        if o["prepared"]:
            self.prepare()
        torch.manual_seed(100 * o["seed"] + self.rank)  # every rank its own noise, as scripts with dropout do
        self.skip_in_every_epoch = False
        self.skip = True
        self.steps = 0
        self.micro = 0

    def prepare(self) -> None:
        """What every script does before it loads."""
        o = self.options
        if o.get("frozen"):
            next(self.model.children()).requires_grad_(False)
        if o.get("compiled"):
            self.model.compile(backend="eager")
        things = (self.model, self.optimizer, self.loader)
        if self.scheduler is not None and o["prepare"]:  # all at once: DeepSpeed's engine must see the scheduler
            self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(*things, self.scheduler)
        else:
            self.model, self.optimizer, self.loader = self.accelerator.prepare(*things)
        if o.get("counter"):
            self.counter = Counter()
            self.accelerator.register_for_checkpointing(self.counter)
        if self.scheduler is not None and o["register"]:
            self.accelerator.register_for_checkpointing(self.scheduler)

    def train(self, num_steps: int, rows: list[Row], plan: Plan | None = None) -> None:
        """Train `num_steps` optimizer steps from where the launch stands, logging each."""
        target, skip = self.steps + num_steps, self.micro % EPOCH_BATCHES if self.skip else 0
        while self.steps < target:
            loader = skip_first_batches(self.loader, skip) if skip else self.loader
            for (x,) in loader:
                self._batch(x, rows, plan)
                if self.steps >= target:
                    return
            skip = skip if self.skip_in_every_epoch else 0

    def _batch(self, x: Any, rows: list[Row], plan: Plan | None) -> None:
        x = x.to(next(self.model.parameters()).dtype)
        with self.accelerator.accumulate(self.model):
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            self.accelerator.backward(loss)
            step_here = len(rows) + 1
            if self.accelerator.sync_gradients and plan is not None and step_here in plan.at_step:
                plan.at_step[step_here](self)
            lr = float(self.optimizer.param_groups[0]["lr"])
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.optimizer.zero_grad()
        self.micro += 1
        if self.accelerator.sync_gradients:
            self.steps += 1
            if self.options.get("counter"):
                self.counter.updates += 1
            rows.append((self.steps, {"lr": lr, "loss": float(loss.detach())}))


def first(folder: Path, run_dir: Path | None, plan: Plan) -> tuple[Path, list[Row]]:
    """The launch that saves at step 12 and goes on to step 40; returns the checkpoint and its log."""
    launch, rows = AccelerateLaunch(run_dir, plan.first), []
    launch.train(SAVED_AT, rows)
    checkpoint = folder / "checkpoints" / f"opt_step-{SAVED_AT}"
    launch.accelerator.save_state(str(checkpoint))
    if run_dir is not None:
        launch.accelerator.chronicle.sealer.finish()
    if plan.first.get("saves_again"):
        launch.train(SAVED_AT, rows)
        launch.accelerator.save_state(str(checkpoint.with_name(f"opt_step-{2 * SAVED_AT}")))
        if run_dir is not None:
            launch.accelerator.chronicle.sealer.finish()
    launch.train(NUM_FIRST - launch.steps, rows)
    launch.accelerator.wait_for_everyone()
    return checkpoint, rows


def resume(checkpoint: Path, run_dir: Path | None, plan: Plan, rows: list[Row]) -> None:
    """The launch that resumes; `rows` is filled as it trains, whatever happens."""
    launch = AccelerateLaunch(run_dir, {**plan.first, **plan.again})
    for hook in plan.before_load:
        hook(launch)
    if plan.again.get("load", True):
        launch.accelerator.load_state(str(checkpoint))
        launch.steps = SAVED_AT
        launch.micro = SAVED_AT * launch.options["accumulation"]
    for hook in plan.after_load:
        hook(launch)
    launch.train(plan.num_steps, rows, plan)


def _optimizer(model: Any, options: dict[str, Any]) -> Any:
    body, head = split_parameters(model, swapped=options.get("swapped", False))
    groups = [{"params": body}, {"params": head, "lr": 5e-3}]
    if options.get("one_group"):
        groups = [{"params": list(model.parameters())}]
    if options["optimizer"] == "SGD":
        return torch.optim.SGD(groups, lr=1e-3, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-2, amsgrad=options["optimizer"] == "AMSGrad")


def _accelerator_options(o: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"gradient_accumulation_steps": o["accumulation"]}
    out["dataloader_config"] = DataLoaderConfiguration(use_seedable_sampler=True)
    if "WORLD_SIZE" in os.environ:
        out["kwargs_handlers"] = [InitProcessGroupKwargs(backend="gloo")]
    if o["zero"]:
        from accelerate.utils import DeepSpeedPlugin

        config = {
            "train_micro_batch_size_per_gpu": o["batch"],
            "gradient_accumulation_steps": o["accumulation"],
            "zero_optimization": {"stage": o["zero"]},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        out["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config)
    return out
