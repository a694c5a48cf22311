"""SimpleTuner PR #1174: the learning rate is to be changed while the run goes on."""

from pathlib import Path

from tests.reproductions.case import Answer, Case
from tests.reproductions.hf_run import Rates, trainer


def bare(folder: Path) -> None:
    rates = Rates()
    trainer(folder / "out", None, rates=rates, max_steps=8).train()
    assert rates.rates[8] > 1e-5  # nothing outside the process can change it


def guarded(folder: Path) -> str:
    return "there is no command that changes the rate of a run that goes on"


CASE = Case(
    row=7,
    source="SimpleTuner PR #1174; DH_live #47; rf-detr #1209",
    pain="change the learning rate without a stop",
    without="stop, edit, start again",
    answer=Answer.COMMAND,
    says=("rate changed",),
    bare=bare,
    guarded=guarded,
    waits_for="a run that goes on has no control channel: the guard is inside the step, but it obeys nobody while it runs",
)
