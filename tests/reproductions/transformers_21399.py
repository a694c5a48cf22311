"""transformers #21399: a new learning rate is passed at a resume, and the checkpoint's is used."""

import subprocess
import sys
from pathlib import Path

from tests.reproductions.case import Answer, Case, heard
from tests.reproductions.hf_run import Rates, trainer


def bare(folder: Path) -> None:
    trainer(folder / "out", None, max_steps=8).train()
    rates = Rates()
    trainer(folder / "out", None, rates=rates, max_steps=8, learning_rate=1e-7).train(str(folder / "out/checkpoint-4"))
    assert rates.rates[5] > 1e-4, rates.rates


def guarded(folder: Path) -> str:
    run = folder / "logs" / "run"
    trainer(folder / "out", run, max_steps=8).train()
    rollback = [sys.executable, "-c", "from chronicle_ml import main; main()", "rollback", "--to", "4", "--lr", "1e-7", "--yes"]
    where = ["--run", "run", "--logs", str(folder / "logs"), "--checkpoints", str(folder / "out")]
    done = subprocess.run([*rollback, *where], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rates = Rates()
    said = heard(lambda: trainer(folder / "out", run, rates=rates, max_steps=8).train(str(folder / "out/checkpoint-4")))
    return f"{said}\nrate of step 5: {rates.rates.get(5):.0e}"


CASE = Case(
    row=1,
    source="transformers #21399, #28867; pytorch/examples #816; rf-detr #1209",
    pain="`--learning_rate` at a resume has no effect",
    without="the wish is ignored: the rate is the checkpoint's",
    answer=Answer.COMMAND,
    says=("rate of step 5: [0-9]e-0[78]",),
    bare=bare,
    guarded=guarded,
)
