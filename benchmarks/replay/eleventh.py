"""Planted causes on seven trainings: a U-Net, LBFGS, metric learning, a graph, Lightning, distillation, a compiled GPT.

The eleventh list, written on 27 November 2026 by someone who had read what the issue asks and not how replay answers; frozen
before it was played. Twenty-four plays are of the kinds that the issue names, twelve are such as happen to people on call, and
four are controls, in which a machine is never to blame. The seven trainings (`eleventh_trainings.py`) were seen to resume to
the bit, and every fault and change to alter the weights from its step on and not before, in plain runs without `chronicle run`.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.replay.bending import variant
from benchmarks.replay.causes import Cause, Training, edit, set_variable, upgrade
from benchmarks.replay.eighth import TORCHRUN
from benchmarks.replay.eleventh_trainings import (
    SOFTDICE,
    lay_cells,
    lay_graph,
    lay_language,
    lay_pump,
    lay_shelf,
    lay_spring,
    lay_students,
)
from benchmarks.replay.planting import fault
from chronicle.replay.verdict import ReplayVerdict as V

PYTHON = [sys.executable, "train.py"]
CELLS = Training(lay=lay_cells, command=PYTHON, asked=37)
SPRING = Training(lay=lay_spring, command=PYTHON, asked=38)
SHELF = Training(lay=lay_shelf, command=PYTHON, asked=36)
GRAPH = Training(lay=lay_graph, command=PYTHON, asked=38)
PUMP = Training(lay=lay_pump, command=PYTHON, asked=48)
STUDENTS = Training(lay=lay_students, command=[*TORCHRUN, "train.py"], asked=37)
LANGUAGE = Training(lay=lay_language, command=PYTHON, asked=36)


# ---- what is planted ------------------------------------------------------------------------------------------------------


def causes() -> Iterator[Cause]:
    """All of them: first those that the issue names, then others, then those where no machine is to blame."""
    yield from _of_the_issue()
    yield from _of_people_on_call()
    yield from _controls()


def _of_the_issue() -> Iterator[Cause]:
    hardware = (
        ("bit of one rank's gradient of logits", STUDENTS, fault("gradient", 34, 71)),
        ("bit of the last convolution's gradient", CELLS, fault("gradient", 35, 400)),
        ("bit of a sparse gradient", GRAPH, fault("gradient", 34, 9)),
        ("bit of a tied embedding", LANGUAGE, fault("weight", 33, 222)),
        ("bit of a weight under LBFGS", SPRING, fault("weight", 35, 130)),
        ("slow poison of an embedder over 20 steps", SHELF, fault("poison", 16, 300)),
    )
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)
    data = (
        ("bit of a batch of turned pictures", CELLS, fault("batch", 34, 500)),
        ("bit of one rank's logits of the teacher", STUDENTS, fault("logits", 35, 3)),
        ("windows of two steps exchanged", LANGUAGE, fault("swapped", 33)),
        ("a view taken twice", SHELF, fault("twice", 34)),
    )
    for name, training, planted in data:
        yield Cause(name=name, expected=V.DATA, training=training, fault=planted)
    yield Cause(name="a mask drawn anew", expected=V.DATA, training=CELLS, later=_draw_mask)
    yield Cause(name="a feature of a paper corrected", expected=V.DATA, training=GRAPH, later=_correct_paper)
    damped = edit("physics.py", "2 * damping * speed", "2 * damping * speed.abs()")
    yield Cause(name="a line of the equation", expected=V.CODE, training=SPRING, later=damped)
    straighter = edit("train.py", "y, beta=0.1)", "y, beta=0.2)")
    yield Cause(name="a line of the Lightning module", expected=V.CODE, training=PUMP, later=straighter)
    smoother = upgrade("vendor/softdice", "1.2.0", "1.3.0", "(all_ + 1)", "(all_ + 10)")
    yield Cause(name="another version of the Dice loss", expected=V.CODE, training=CELLS, later=smoother)
    smoothed = edit("conf.json", '"smooth": 0.1', '"smooth": 0.05')
    yield Cause(name="a setting of the smoothing", expected=V.CODE, training=GRAPH, later=smoothed)
    variables = (("the temperature", STUDENTS, "KD_TEMPERATURE", "2.5"), ("log Z", LANGUAGE, "Z_LOSS", "5e-3"))
    for name, training, variable, value in variables:
        later = set_variable(variable, value)
        yield Cause(name=f"another variable for {name}", expected=V.CODE, training=training, later=later)
    state = (
        ("torch seeded anew before dropout", LANGUAGE, fault("reseeded", 34)),
        ("NumPy seeded anew before the noise", PUMP, fault("reseeded", 44)),
        ("the LR of one step by hand", LANGUAGE, fault("lr", 35)),
        ("weight decay of SGD by hand", CELLS, fault("decay", 33)),
    )
    for name, training, planted in state:
        yield Cause(name=name, expected=V.STATE, training=training, fault=planted)
    chance = (("neighbours summed as they come", GRAPH, "order"), ("a convolution never the same", CELLS, "kernel"))
    for name, training, planted in chance:
        yield Cause(name=name, expected=V.RANDOM, training=training, fault=fault(planted, 0), stays=True)


def _of_people_on_call() -> Iterator[Cause]:
    hardware = (
        ("bit of a momentum", SHELF, fault("buffer", 33, 1111)),
        ("bit of the memory of LBFGS", SPRING, fault("history", 36, 200)),
        ("a rank whose weights are others", STUDENTS, fault("drift", 33, 444)),
        # Made once at the start and in no checkpoint: a constant in memory.
        ("bit of the class weights", CELLS, fault("rarity", 36, 1)),
        ("bit of a hidden state in Lightning", PUMP, fault("activation", 46, 777)),
    )
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)
    yield Cause(name="a picture that could not be read", expected=V.DATA, training=CELLS, fault=fault("grey", 32, 4))
    yield Cause(name="a gap of the pump filled in", expected=V.DATA, training=PUMP, later=_fill_in)
    yield Cause(name="a checkpoint with an older generator", expected=V.STATE, training=GRAPH, fault=fault("stale", 30))
    yield Cause(name="momentum raised by hand", expected=V.STATE, training=SHELF, fault=fault("momentum", 33))
    yield Cause(name="a file that hides the package", expected=V.CODE, training=CELLS, later=_hide)
    # Read once and removed, as the script does: a setting's file that is gone. That nobody knows what was in it is honest.
    ordered = Training(lay=_lay_ordered, command=SHELF.command, asked=SHELF.asked)
    yield Cause(name="orders of an operator, read and removed", expected=V.CODE, weaker=V.NOT_TOLD, training=ordered)
    unseeded = variant(PUMP, "wrong = np.random.normal(", "wrong = np.random.default_rng().normal(")
    yield Cause(name="noise that nobody seeds", expected=V.RANDOM, training=unseeded)


def _controls() -> Iterator[Cause]:
    yield Cause(name="nothing planted, LBFGS", expected=V.REPRODUCED, training=SPRING)
    yield Cause(name="a comment and a name, old logs removed", expected=V.REPRODUCED, training=STUDENTS, later=_tidy_up)
    spike = Training(lay=_lay_spike, command=PUMP.command, asked=44)
    yield Cause(name="a jump of the loss by a spike of the pump", expected=V.REPRODUCED, training=spike)
    # The file is another one, what is read of it is not: the hours that came since lie behind the last that is used.
    yield Cause(name="new hours at the end of the table", expected=V.REPRODUCED, training=PUMP, later=_more_hours)


def _draw_mask(directory: Path, environ: dict[str, str]) -> None:
    """Of the picture that step 34 reads as its third."""
    import numpy as np

    epoch, place = divmod(33 * 6, 96)
    row = np.random.default_rng(1000 + epoch).permutation(96)[place + 2]
    masks = np.load(directory / "cells/masks.npy")
    masks[row] = np.roll(masks[row], 2, axis=1)
    np.save(directory / "cells/masks.npy", masks)


def _correct_paper(directory: Path, environ: dict[str, str]) -> None:
    """A paper that is among the ten of step 34."""
    lines = (directory / "papers.csv").read_text().splitlines()
    values = lines[PAPER + 1].split(",")
    values[3] = f"{float(values[3]) + 2:.3f}"
    lines[PAPER + 1] = ",".join(values)
    (directory / "papers.csv").write_text("\n".join(lines) + "\n")


PAPER = 108


def _change_hour(directory: Path, hour: int, pressure: float) -> None:
    lines = (directory / "pump.csv").read_text().splitlines()
    lines[hour + 1] = f"{hour},{pressure:.3f}"
    (directory / "pump.csv").write_text("\n".join(lines) + "\n")


def _fill_in(directory: Path, environ: dict[str, str]) -> None:
    """Three hours that are read in step 44."""
    for hour in range(HOUR, HOUR + 3):
        _change_hour(directory, hour, 5)


def _lay_spike(directory: Path) -> None:
    """The valve slammed: no other hour is like it."""
    lay_pump(directory)
    _change_hour(directory, HOUR, 400)


HOUR = 364


def _hide(directory: Path, environ: dict[str, str]) -> None:
    """Somebody tried a file of the package's name beside the script and left it there."""
    (directory / "softdice.py").write_text(SOFTDICE.replace("(1 - 2 * both", "(1 - 1.9 * both"))


def _lay_ordered(directory: Path) -> None:
    lay_shelf(directory)
    (directory / "control.json").write_text(json.dumps({"from": 33, "scale": 1.5}))


def _tidy_up(directory: Path, environ: dict[str, str]) -> None:
    edit("train.py", "# Where both agree, the teacher is followed; the rest is the labels.", "# 0.7 of the teacher, 0.3 of the "
         "labels.\n# The teacher is not here: it has spoken.")(directory, environ)  # fmt: skip
    environ["KD_NAME"] = "pupil"
    for path in directory.glob("student-*.log"):
        path.unlink()


def _more_hours(directory: Path, environ: dict[str, str]) -> None:
    with (directory / "pump.csv").open("a") as lines:
        lines.writelines(f"{hour},{5 + hour % 3:.3f}\n" for hour in range(760, 800))
