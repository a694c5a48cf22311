"""axolotl PR #3948: the newest checkpoint is half written, and the Trainer goes on with what it finds."""

from pathlib import Path

from tests.reproductions.case import Answer, Case, heard
from tests.reproductions.hf_run import trainer


def torn(folder: Path) -> str:
    """The newest checkpoint as a kill left it: the weights are there, the optimizer is not."""
    checkpoint = folder / "out" / "checkpoint-8"
    for name in ("optimizer.pt", "scheduler.pt"):
        (checkpoint / name).unlink()
    return str(checkpoint)


def bare(folder: Path) -> None:
    trainer(folder / "out", None, max_steps=8).train()
    made = trainer(folder / "out", None, max_steps=12)
    made.train(torn(folder))
    assert made.state.global_step == 12  # it went on, without its optimizer


def guarded(folder: Path) -> str:
    run = folder / "logs" / "run"
    trainer(folder / "out", run, max_steps=8).train()
    checkpoint = torn(folder)
    return heard(lambda: trainer(folder / "out", run, max_steps=8).train(checkpoint), run)


CASE = Case(
    row=20,
    source="axolotl PR #3948; transformers #35525, #35782; metaseq #53",
    pain="the newest checkpoint is half written",
    without="the Trainer starts with a new optimizer and a new schedule, and says nothing",
    answer=Answer.REFUSED,
    says=("REFUSED", "optimizer.pt"),
    bare=bare,
    guarded=guarded,
)
