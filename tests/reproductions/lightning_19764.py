"""Lightning #19764: a run that is resumed in the middle of an epoch gets other batches."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from chronicle.resume.lightning import ChronicleCallback
from tests.reproductions.case import Answer, Case, heard


class Line(pl.LightningModule):  # type: ignore[misc]
    """A line that keeps the numbers it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def training_step(self, batch: Any, _: int) -> Any:
        self.seen.append([int(value) for value in batch[0].flatten()])
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Save(pl.Callback):  # type: ignore[misc]
    """Saves once, at step 11 of 16."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 11 and not self.path.exists():
            trainer.save_checkpoint(self.path)


def launch(folder: Path, guarded: bool, load: bool) -> list[list[int]]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(0, verbose=False)
    data = torch.utils.data.TensorDataset(torch.arange(16.0).unsqueeze(1))
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    path, module = folder / "step=11.ckpt", Line()
    callbacks = [*([ChronicleCallback(folder / "logs" / "run")] if guarded else []), Save(path)]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_steps=16, accelerator="cpu", callbacks=callbacks, **quiet)
    trainer.fit(module, loader, ckpt_path=path if load else None)
    return module.seen if load else module.seen[11:]


def bare(folder: Path) -> None:
    assert launch(folder, False, False) != launch(folder, False, True)


def guarded(folder: Path) -> str:
    launch(folder, True, False)
    return heard(lambda: launch(folder, True, True), folder / "logs" / "run")


CASE = Case(
    row=10,
    source="lightning #19764, #5325, #18780, #19617",
    pain="a resume in the middle of an epoch: other batches",
    without="other batches; Lightning warns in general",
    answer=Answer.NAMED,
    says=("next batch(?!.*not on record)",),
    bare=bare,
    guarded=guarded,
)
