"""The HF Trainer of the reproductions: five weights, 64 rows, real checkpoints."""

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

__all__ = ["Rates", "trainer"]


class Model(torch.nn.Module):
    """A line; its loss is NaN from the call `nan_from` on."""

    def __init__(self, nan_from: int) -> None:
        super().__init__()
        self.layer, self.calls, self.nan_from = torch.nn.Linear(4, 1), 0, nan_from

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        self.calls += 1
        out = self.layer(x)
        loss = (out - labels).square().mean()
        return {"loss": loss * float("nan") if self.calls >= self.nan_from else loss, "logits": out}


class Rates(TrainerCallback):  # type: ignore[misc]
    """The rate of every optimizer step, and what was logged."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}
        self.losses: dict[int, float] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.rates[state.global_step + 1] = float(optimizer.param_groups[0]["lr"])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses[state.global_step] = float(logs["loss"])


def trainer(out: Path, run_dir: Path | None, *, rates: Rates | None = None, nan_from: int = 10**9, **settings: Any) -> Any:
    """A Trainer, with the callback when there is a run."""
    from chronicle.resume.transformers import ChronicleCallback

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    rows = [{"x": torch.randn(4, generator=generator), "labels": torch.zeros(1)} for _ in range(64)]
    usual = {"max_steps": 16, "save_steps": 4, "logging_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    arguments = TrainingArguments(str(out), report_to=[], use_cpu=True, disable_tqdm=True, **{**usual, **settings})
    callbacks: list[Any] = [*([rates] if rates else []), *([ChronicleCallback(run_dir)] if run_dir else [])]
    made = Trainer(Model(nan_from), arguments, train_dataset=rows, callbacks=callbacks)
    made.remove_callback(PrinterCallback)
    return made
