"""Planted causes on six trainings (a small GPT, preferences, two towers, flow, a forecast, a student) and four known ones.

The seventeenth list, written on 27 November 2026 by someone who had read what the issue asks and not how replay answers;
frozen before it was played. Twenty-four plays are of the kinds that the issue names, twelve are such as happen to people
on call, and four are controls, in which nothing or something harmless is planted. The six trainings
(`seventeenth_trainings.py`) were seen to resume to the bit, and every fault and change to alter what is trained, in plain
runs without `chronicle run`.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.replay.bending import after, laid, variant
from benchmarks.replay.causes import Cause, Training, edit, set_variable, upgrade
from benchmarks.replay.eighth import TORCHRUN
from benchmarks.replay.fourteenth import CODES, CURVES, MEMORY
from benchmarks.replay.ninth import TYPING
from benchmarks.replay.planting import fault
from benchmarks.replay.seventeenth_trainings import (
    lay_flow,
    lay_forecast,
    lay_gpt,
    lay_preferences,
    lay_student,
    lay_towers,
)
from chronicle.replay.verdict import ReplayVerdict as V

PYTHON = [sys.executable, "train.py"]
GPT = Training(lay=lay_gpt, command=[*PYTHON, "config/train_names.py", "--max_iters=45"], asked=37)
PREFERENCES = Training(lay=lay_preferences, command=PYTHON, asked=36)
TOWERS = Training(lay=lay_towers, command=[*TORCHRUN, "train.py"], asked=38)
FLOW = Training(lay=lay_flow, command=PYTHON, asked=46)
FORECAST = Training(lay=lay_forecast, command=PYTHON, asked=37)
STUDENT = Training(lay=lay_student, command=[*PYTHON, "--temperature", "3.0"], asked=47)


# ---- what is planted -------------------------------------------------------------------------------------------------


def causes() -> Iterator[Cause]:
    """All of them: first those that the issue names, then others, then those where no machine is to blame."""
    yield from _machines_of_the_issue()
    yield from _others_of_the_issue()
    yield from _machines_on_call()
    yield from _others_on_call()
    yield from _controls()


def _machines_of_the_issue() -> Iterator[Cause]:
    hardware = (
        ("bit of a gradient between two micro-batches", GPT, fault("gradient", 34, 600)),
        ("bit of a student's gradient in HF Trainer", STUDENT, fault("gradient", 44, 5)),
        ("bit of a recurrent weight of a policy", PREFERENCES, fault("weight", 33, 400)),
        ("bit of an attention weight in Lightning", FORECAST, fault("weight", 34, 700)),
        ("bit of an activation of the velocity", FLOW, fault("activation", 44, 130)),
        ("bit of the moment of one rank's tower", TOWERS, fault("moment", 34, 500)),
        ("slow poison of the velocity over 20 steps", FLOW, fault("poison", 28, 321)),
    )
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)


def _others_of_the_issue() -> Iterator[Cause]:
    drawn = '    batch = later if kind == "swapped" and step == at + 1 else drawn()\n'
    twice = after(CURVES, drawn, "again", "batch = tuple(part[[0, 1, 2, 3, 4, 4]] for part in batch)")
    data = (
        ("bit of a picture on one rank", TOWERS, fault("batch", 35, 200)),
        ("bit of a letter's number", GPT, fault("token", 35, 22)),
        ("pairs of two steps exchanged", PREFERENCES, fault("swapped", 34)),
        ("a curve taken twice", twice, fault("again", 34)),
    )
    for name, training, planted in data:
        yield Cause(name=name, expected=V.DATA, training=training, fault=planted)
    yield Cause(name="captions of discs written anew", expected=V.DATA, training=TOWERS, later=_caption)
    yield Cause(name="what was preferred, judged anew", expected=V.DATA, training=PREFERENCES, later=_judge)
    yield Cause(name="two days of load measured anew", expected=V.DATA, training=FORECAST, later=_measure)
    soft = edit("distill.py", '"batchmean") * T * T', '"batchmean") * T')
    yield Cause(name="a line of the student's loss", expected=V.CODE, training=STUDENT, later=soft)
    scale = edit("model.py", "1.0 / math.sqrt(k.size(-1))", "1.0 / k.size(-1)")
    yield Cause(name="a line of attention", expected=V.CODE, training=GPT, later=scale)
    noisier = upgrade("vendor/flowkit", "0.2.1", "0.3.0", "SIGMA = 1e-3", "SIGMA = 1e-2")
    yield Cause(name="another version of the paths", expected=V.CODE, training=FLOW, later=noisier)
    slower = upgrade("third_party/seriesbox", "3.4.0", "4.0.0", "BASE = 10000.0", "BASE = 1000.0")
    yield Cause(name="another version of the positions", expected=V.CODE, training=FORECAST, later=slower)
    yield Cause(
        name="another variable for beta", expected=V.CODE, training=PREFERENCES, later=set_variable("DPO_BETA", "0.3")
    )
    forgetful = edit("configs/base.yaml", "dropout: 0.1", "dropout: 0.2")
    yield Cause(name="a settings file with more dropout", expected=V.CODE, training=TYPING, later=forgetful)
    lengths = after(MEMORY, "    update, start_time = update + 1, time.time()\n", "reseeded", "np.random.seed(args.seed)",
                    "update")  # fmt: skip
    state = (
        ("NumPy seeded anew before a length is drawn", lengths, fault("reseeded", 34)),
        ("half the LR of one cycle in Lightning", FORECAST, fault("lr", 34)),
        ("weight decay of two ranks raised", TOWERS, fault("decay", 33)),
    )
    for name, training, planted in state:
        yield Cause(name=name, expected=V.STATE, training=training, fault=planted)
    yield Cause(
        name="sums of a layer never the same", expected=V.RANDOM, training=FLOW, fault=fault("loose", 0), stays=True
    )


def _machines_on_call() -> Iterator[Cause]:
    hardware = (
        ("features of the other rank one step old", TOWERS, fault("stale", 35)),
        ("a row of weights lost to zeros", GPT, fault("row", 34, 11)),
        ("bit of the frozen reference", PREFERENCES, fault("reference", 33, 900)),
        ("an update of one weight that never came", STUDENT, fault("lost", 44)),
        ("a lane that gives ones from a step on", FORECAST, fault("lane", 34, 5)),
    )
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)


def _others_on_call() -> Iterator[Cause]:
    yield Cause(name="a page of zeros from the disk", expected=V.DATA, training=GPT, fault=fault("page", 35))
    yield Cause(
        name="one rank in the order of the first epoch", expected=V.DATA, training=TOWERS, fault=fault("epoch", 36)
    )
    yield Cause(name="pixels exported anew in eight bits", expected=V.DATA, training=FLOW, later=_export)
    nearer = edit("vendor/vqkit/__init__.py", "NEAR = 0.25", "NEAR = 0.35")
    yield Cause(name="a package mended in place", expected=V.CODE, training=CODES, later=nearer)
    yield Cause(name="local settings that came after the run", expected=V.CODE, training=TOWERS, later=_override)
    moments = fault("moments", 30)
    yield Cause(name="a checkpoint with moments too high", expected=V.STATE, training=PREFERENCES, fault=moments)
    cut = variant(PREFERENCES, "import os\n", "import os\nimport secrets\n",
                  'row["prompt"][-most:]', 'row["prompt"][-most + secrets.randbelow(4) :]')  # fmt: skip
    yield Cause(name="prompts cut where the system chooses", expected=V.RANDOM, training=cut)


def _controls() -> Iterator[Cause]:
    yield Cause(name="nothing planted, two towers", expected=V.REPRODUCED, training=TOWERS)
    wild = replace(laid(FORECAST, _lay_wild), asked=38)
    yield Cause(name="a jump of the loss by a broken meter", expected=V.REPRODUCED, training=wild)
    yield Cause(name="tickets in quotes, a comment", expected=V.REPRODUCED, training=STUDENT, later=_quote)
    yield Cause(name="a step that was slow", expected=V.REPRODUCED, training=FLOW, fault=fault("slow", 44))


def _caption(directory: Path, environ: dict[str, str]) -> None:
    """Discs are called otherwise; the count of words stays."""
    path = directory / "data/captions.json"
    text = path.read_text()
    assert " disc " in text
    path.write_text(text.replace(" disc ", " dot "))


def _judge(directory: Path, environ: dict[str, str]) -> None:
    """Every fourth pair the other way round."""
    import json

    path = directory / "pairs.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[::4]:
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _measure(directory: Path, environ: dict[str, str]) -> None:
    """A meter had shown a third too little for 48 hours."""
    import pandas as pd

    frame = pd.read_csv(directory / "load.csv")
    frame.loc[100:147, "load"] = (frame.loc[100:147, "load"] * 1.5).round(3)
    frame.to_csv(directory / "load.csv", index=False)


def _export(directory: Path, environ: dict[str, str]) -> None:
    """From the same pictures, but through eight bits."""
    import numpy as np

    with np.load(directory / "digits.npz") as held:
        pixels, classes = held["pixels"], held["classes"]
    pixels = (np.round((pixels + 1) * 127.5) / 127.5 - 1).astype("float32")
    np.savez(directory / "digits.npz", pixels=pixels, classes=classes)


def _override(directory: Path, environ: dict[str, str]) -> None:
    (directory / "settings.local.yaml").write_text("dropout: 0.3\n")


def _lay_wild(directory: Path) -> None:
    """For a few hours the load is forty times too high, as it was measured; windows of several steps see it."""
    import pandas as pd

    frame = pd.read_csv(directory / "load.csv")
    frame.loc[200:203, "load"] *= 40
    frame.to_csv(directory / "load.csv", index=False)


def _quote(directory: Path, environ: dict[str, str]) -> None:
    """The same rows in other bytes; a line of the script is said in other words."""
    import csv

    path = directory / "tickets.csv"
    with path.open(newline="") as lines:
        rows = list(csv.reader(lines))
    with path.open("w", newline="") as lines:
        csv.writer(lines, quoting=csv.QUOTE_ALL).writerows(rows)
    told = edit("train.py", '"""As a tokenizer would."""', '"""As a tokenizer would do it."""  # it has none')
    told(directory, environ)
