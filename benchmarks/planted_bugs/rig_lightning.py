"""Lightning with a small module; one `.ckpt` file."""

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.planted_bugs.models import MODELS, split_parameters
from benchmarks.planted_bugs.plan import Plan, Row
from benchmarks.planted_bugs.schedulers import SCHEDULERS
from chronicle.resume.lightning import ChronicleCallback

__all__ = ["first", "resume"]

SAVED_AT = 12
NUM_FIRST = 36
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Regression(pl.LightningModule):
    """A linear model; what it logs goes into `rows`."""

    def __init__(self, options: dict[str, Any], rows: list[Row]) -> None:
        super().__init__()
        self.layer: Any = MODELS[options["model"]]() if "model" in options else torch.nn.Linear(8, 1)
        if options.get("frozen"):
            next(self.layer.children()).requires_grad_(False)
        self.options, self.rows = options, rows

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        loss = (self.layer(x) - x.sum(1, keepdim=True)).square().mean()
        lr = float(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.rows.append((self.trainer.global_step + 1, {"lr": lr, "loss": loss.item()}))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        body, head = split_parameters(self.layer, swapped=self.options.get("swapped", False))
        optimizer = torch.optim.AdamW([*body, *head], lr=1e-2)
        scheduler = SCHEDULERS[self.options.get("scheduler", "ExponentialLR")](optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Hooks(pl.Callback):
    """Plants what a plan wants, before the guard looks and at later steps."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for hook in self.plan.after_load:
            hook(trainer)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.steps += 1
        if self.steps in self.plan.at_step:
            self.plan.at_step[self.steps](trainer)


def _fit(
    folder: Path,
    run_dir: Path | None,
    options: dict[str, Any],
    rows: list[Row],
    plan: Plan | None,
    steps: int,
    ckpt: Path | None,
) -> Any:
    torch.manual_seed(0)
    module = Regression(options, rows)
    data = torch.utils.data.TensorDataset(torch.randn(options.get("num_rows", 400), 8))
    accept = options.get("accept", {})
    guard = None if run_dir is None else ChronicleCallback(run_dir, accept_change=accept)
    callbacks = [*([Hooks(plan)] if plan else []), *([guard] if guard is not None else [])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            max_steps=steps,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(folder),
            callbacks=callbacks,
            gradient_clip_val=options.get("clip"),
            accumulate_grad_batches=options.get("accumulation", 1),
            **options.get("trainer", {}),
        )
        size, shuffle = options.get("batch", 4), options.get("shuffle", False)
        loader = torch.utils.data.DataLoader(data, size, shuffle=shuffle, num_workers=options.get("workers", 0))
        looked = torch.utils.data.DataLoader(data, batch_size=8) if options.get("evaluation") else None
        trainer.fit(module, loader, looked, ckpt_path=None if ckpt is None else str(ckpt), weights_only=False)
    return trainer


def first(folder: Path, run_dir: Path | None, plan: Plan) -> tuple[Path, list[Row]]:
    """Save at step 12; a second fit goes on to 36 for the log's sake, in a launch of its own."""
    rows: list[Row] = []
    trainer = _fit(folder, run_dir, plan.first, rows, None, SAVED_AT, None)
    path = folder / f"step={SAVED_AT}.ckpt"
    trainer.save_checkpoint(path)
    for callback in trainer.callbacks:
        if isinstance(callback, ChronicleCallback) and callback.session is not None:
            callback.session.sealer.finish()
    return path, rows[:SAVED_AT]


def resume(path: Path, run_dir: Path | None, plan: Plan, rows: list[Row]) -> None:
    """The launch that resumes."""
    ckpt = path if plan.again.get("load", True) else None
    _fit(path.parent, run_dir, {**plan.first, **plan.again}, rows, plan, SAVED_AT + plan.num_steps, ckpt)
