"""HF Trainer with a model of five weights and real checkpoints."""

from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.planted_bugs.plan import Plan, Row
from chronicle.resume.transformers import ChronicleCallback

__all__ = ["first", "resume"]

SAVED_AT = 12
NUM_FIRST = 36


class Regression(torch.nn.Module):
    """As little model as the Trainer accepts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layer(self.dropout(x))
        return {"loss": (out - labels).square().mean(), "logits": out}


class Hooks(transformers.TrainerCallback):  # type: ignore[misc]
    """Stops the first launch, plants what a plan wants, and keeps the log."""

    def __init__(self, rows: list[Row], plan: Plan | None, stop_at: int) -> None:
        self.rows, self.plan, self.stop_at = rows, plan, stop_at

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.parts = parts
        for hook in self.plan.after_load if self.plan else ():
            hook(parts)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.lr = float(parts["optimizer"].param_groups[0]["lr"])
        if self.plan is not None and len(self.rows) + 1 in self.plan.at_step:
            self.plan.at_step[len(self.rows) + 1](parts)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> Any:
        if state.global_step >= self.stop_at:
            control.should_training_stop = True
        self.rows.append((state.global_step, {"lr": self.lr}))
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **parts: Any) -> None:
        if logs and "loss" in logs and self.rows:
            self.rows[-1][1]["loss"] = float(logs["loss"])


def _trainer(out: Path, run_dir: Path | None, options: dict[str, Any], hooks: Hooks) -> Any:
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(options.get("data_seed", 0))
    inputs = torch.randn(options.get("num_rows", 4 * 100), 4, generator=generator)
    rows = [{"x": x, "labels": x.sum().reshape(1)} for x in inputs]
    settings = {"learning_rate": 1e-2, "warmup_steps": 6, "max_steps": 80, "save_steps": SAVED_AT, "logging_steps": 1,
                "per_device_train_batch_size": 4, **{k: v for k, v in options.items() if k not in OWN}}  # fmt: skip
    arguments = transformers.TrainingArguments(
        output_dir=str(out), report_to=[], use_cpu=True, disable_tqdm=True, save_total_limit=4, **settings
    )
    # the guard comes after the hooks: what they plant at the beginning of training is there when it looks
    callbacks = [hooks, *([ChronicleCallback(run_dir, same_data=True)] if run_dir is not None else [])]
    looked = rows[:20] if options.get("evaluation") else None
    trainer = transformers.Trainer(
        model=Regression(), args=arguments, train_dataset=rows, eval_dataset=looked, callbacks=callbacks
    )
    for unwanted in (transformers.trainer_callback.PrinterCallback, transformers.trainer_callback.ProgressCallback):
        trainer.remove_callback(unwanted)
    return trainer


OWN = ("load", "saves_again", "evaluation", "data_seed", "num_rows")


def first(folder: Path, run_dir: Path | None, plan: Plan) -> tuple[Path, list[Row]]:
    """Save at step 12 (and 24, 36), stop after 36; the later ones are removed as a rollback would."""
    rows: list[Row] = []
    _trainer(folder / "out", run_dir, plan.first, Hooks(rows, None, NUM_FIRST)).train()
    checkpoint = folder / "out" / f"checkpoint-{SAVED_AT}"
    for step in () if plan.first.get("saves_again") else range(SAVED_AT * 2, NUM_FIRST + 1, SAVED_AT):
        later = folder / "out" / f"checkpoint-{step}"
        later.rename(folder / later.name)
    return checkpoint, rows


def resume(checkpoint: Path, run_dir: Path | None, plan: Plan, rows: list[Row]) -> None:
    """The launch that resumes."""
    hooks = Hooks(rows, plan, SAVED_AT + plan.num_steps)
    trainer = _trainer(checkpoint.parent, run_dir, {**plan.first, **plan.again}, hooks)
    trainer.train(resume_from_checkpoint=str(checkpoint) if plan.again.get("load", True) else None)
