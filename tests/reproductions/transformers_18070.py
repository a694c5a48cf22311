"""transformers #18070: a run is continued for more epochs, and the whole schedule is computed anew."""

from pathlib import Path

from tests.reproductions.case import Answer, Case, heard
from tests.reproductions.hf_run import Rates, trainer


def bare(folder: Path) -> None:
    usual, longer = Rates(), Rates()
    trainer(folder / "out", None, rates=usual, max_steps=8).train()
    trainer(folder / "out", None, rates=longer, max_steps=16).train(str(folder / "out/checkpoint-4"))
    assert longer.rates[6] > 1.5 * usual.rates[6], (longer.rates, usual.rates)


def guarded(folder: Path) -> str:
    run = folder / "logs" / "run"
    trainer(folder / "out", run, max_steps=4, lr_scheduler_kwargs={}, num_train_epochs=2).train()
    return heard(lambda: trainer(folder / "out", run, max_steps=12).train(str(folder / "out/checkpoint-4")), run)


CASE = Case(
    row=3,
    source="transformers #18070",
    pain="more epochs at a resume: the rate of every later step is another one",
    without="the rate jumps at the resume and nothing says so",
    answer=Answer.NAMED,
    says=("(?i)learning rate|schedule",),
    bare=bare,
    guarded=guarded,
)
