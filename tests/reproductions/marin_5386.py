"""marin #5386: a corrupt checkpoint is resumed from, and thousands of steps are lost before anybody notices."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.reproductions.case import Answer, Case, heard
from tests.reproductions.hf_run import trainer


def corrupt(folder: Path) -> str:
    """Weights of the right shapes and another content, as a bad block of a disk leaves them."""
    path = folder / "out" / "checkpoint-8" / "model.safetensors"
    save_file({name: tensor.flip(0) * 3 for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    return str(path.parent)


def bare(folder: Path) -> None:
    trainer(folder / "out", None, max_steps=12).train()
    made = trainer(folder / "out", None, max_steps=12)
    made.train(corrupt(folder))
    assert made.state.global_step == 12


def guarded(folder: Path) -> str:
    run = folder / "logs" / "run"
    trainer(folder / "out", run, max_steps=8).train()
    checkpoint = corrupt(folder)
    return heard(lambda: trainer(folder / "out", run, max_steps=8).train(checkpoint), run)


CASE = Case(
    row=21,
    source="marin #5386, #5319",
    pain="corrupt checkpoints are resumed from",
    without="training goes on from other weights",
    answer=Answer.REFUSED,
    says=("REFUSED", "model.safetensors"),
    bare=bare,
    guarded=guarded,
)
