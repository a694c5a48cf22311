"""LLaMA-Factory #4595: the learning rate is edited in trainer_state.json by hand, which changes nothing."""

import json
from pathlib import Path

from tests.reproductions.case import Answer, Case, heard
from tests.reproductions.hf_run import Rates, trainer


def edit(folder: Path) -> str:
    path = folder / "out" / "checkpoint-4" / "trainer_state.json"
    state = json.loads(path.read_text())
    for row in state["log_history"]:
        row["learning_rate"] = 1e-7
    path.write_text(json.dumps(state))
    return str(path.parent)


def bare(folder: Path) -> None:
    trainer(folder / "out", None, max_steps=8).train()
    rates = Rates()
    trainer(folder / "out", None, rates=rates, max_steps=8).train(edit(folder))
    assert rates.rates[5] > 1e-4, rates.rates


def guarded(folder: Path) -> str:
    run = folder / "logs" / "run"
    trainer(folder / "out", run, max_steps=4).train()
    checkpoint = edit(folder)
    return heard(lambda: trainer(folder / "out", run, max_steps=4).train(checkpoint), run)


CASE = Case(
    row=2,
    source="LLaMA-Factory #4595",
    pain="the rate is edited in a file that is a log, not the state",
    without="the edit has no effect and nothing says so",
    answer=Answer.REFUSED,
    says=("REFUSED", "trainer_state.json"),
    bare=bare,
    guarded=guarded,
)
