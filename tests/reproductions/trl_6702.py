"""trl #6702: the loss is NaN, the Trainer logs 0.0, optimises it and saves it."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.reproductions.case import Answer, Case, heard
from tests.reproductions.hf_run import Rates, trainer


def bare(folder: Path) -> None:
    rates = Rates()
    trainer(folder / "out", None, rates=rates, nan_from=6, max_steps=12).train()
    weights = load_file(folder / "out" / "checkpoint-12" / "model.safetensors")
    assert any(torch.isnan(tensor).any() for tensor in weights.values())
    assert rates.losses[12] == 0.0


def guarded(folder: Path) -> str:
    run = folder / "logs" / "run"
    return heard(lambda: trainer(folder / "out", run, nan_from=6, max_steps=12).train(), run)


CASE = Case(
    row=28,
    source="trl #6702; transformers #13758; ModernBERT #233",
    pain="`logging_nan_inf_filter` shows a loss of 0.0 where it is NaN",
    without="the weights are NaN, every later checkpoint too, the log shows 0.0",
    answer=Answer.PROPOSED,
    says=("weights-not-finite", "rollback --to 4"),
    bare=bare,
    guarded=guarded,
)
