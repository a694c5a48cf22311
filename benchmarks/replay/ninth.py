"""Planted causes on seven trainings: characters, Accelerate, DDP, HF Trainer, two optimizers, a table with workers, bf16.

The ninth list, written on 27 November 2026 by someone who had read what the issue asks and not how replay answers; frozen
before it was played. Twenty-four plays are of the kinds that the issue names, twelve are such as happen to people on call, and
four are controls, in which a machine is never to blame. The scripts do what scripts do: print times, draw bars, write tables,
keep a cache, read variables and settings. The seven trainings (`ninth_trainings.py`) were seen to resume to the bit, and every
fault and change to alter the loss or the weights from its step on, in plain runs without `chronicle run`.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.replay.bending import variant
from benchmarks.replay.causes import Cause, Later, Training, edit, set_variable, upgrade
from benchmarks.replay.eighth import TORCHRUN
from benchmarks.replay.ninth_trainings import (
    lay_accelerated,
    lay_characters,
    lay_hugging,
    lay_mixed,
    lay_parallel,
    lay_table,
    lay_teacher,
)
from benchmarks.replay.planting import fault
from chronicle.replay.verdict import ReplayVerdict as V

PYTHON = [sys.executable, "train.py"]
TYPING = Training(lay=lay_characters, command=PYTHON, asked=37)
RATING = Training(lay=lay_accelerated, command=PYTHON, asked=38)
SENSING = Training(lay=lay_parallel, command=[*TORCHRUN, "train.py"], asked=47)
SORTING = Training(lay=lay_hugging, command=PYTHON, asked=48)
LIKING = Training(lay=lay_teacher, command=PYTHON, asked=36)
PRICING = Training(lay=lay_table, command=["bash", "run.sh", "45"], asked=39)
MIXING = Training(lay=lay_mixed, command=PYTHON, asked=56)


# ---- what is planted ------------------------------------------------------------------------------------------------------


def causes() -> Iterator[Cause]:
    """All of them: first those that the issue names, then others, then those where no machine is to blame."""
    yield from _of_the_issue()
    yield from _of_people_on_call()
    yield from _controls()


def _of_the_issue() -> Iterator[Cause]:
    hardware = (
        ("bit of one rank's gradient on its way", SENSING, fault("gradient", 44, 333)),
        ("bit of an accumulated gradient", RATING, fault("gradient", 35, 77)),
        ("bit of a clipped gradient in HF Trainer", SORTING, fault("gradient", 46, 600)),
        ("bit of a recurrent weight", TYPING, fault("weight", 34, 1500)),
        ("bit of a weight of two optimizers", LIKING, fault("weight", 34, 21)),
        ("slow poison of a weight over 20 steps", MIXING, fault("poison", 38, 100)),
    )
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)
    data = (
        ("bit of a batch that workers made", PRICING, fault("batch", 36, 50)),
        ("bit of one rank's batch", SENSING, fault("batch", 45, 130)),
        ("windows of two steps swapped", TYPING, fault("swapped", 33)),
        ("micro-batch taken twice", RATING, fault("duplicated", 36)),
    )
    for name, training, planted in data:
        yield Cause(name=name, expected=V.DATA, training=training, fault=planted)
    yield Cause(name="a picture drawn again", expected=V.DATA, training=MIXING, later=_draw_again)
    yield Cause(name="a price corrected in the table", expected=V.DATA, training=PRICING, later=_price(15, 1))
    slope = edit("network.py", "self.second(x)), 0.1", "self.second(x)), 0.12")
    yield Cause(name="a line of the network", expected=V.CODE, training=SENSING, later=slope)
    smoother = edit("train.py", "save_steps=10,", "save_steps=10, label_smoothing_factor=0.1,")
    yield Cause(name="a line of the arguments", expected=V.CODE, training=SORTING, later=smoother)
    # The rows differ, too, but only because the package that scales them does.
    scaled = upgrade("libs/scaling", "2.0.1", "2.1.0", "table.std(0)", "(table.std(0) + 0.01)")
    yield Cause(name="another version of the scaling", expected=V.CODE, training=PRICING, later=scaled)
    narrower = upgrade("third_party/lossbox", "0.3.1", "0.4.0", "DELTA = 1.0", "DELTA = 0.8")
    yield Cause(name="another version of the loss", expected=V.CODE, training=LIKING, later=narrower)
    variables = (("the clipping", TYPING, "LM_CLIP", "0.25"), ("the smoothing", MIXING, "LABEL_SMOOTHING", "0.05"))
    for name, training, variable, value in variables:
        later = set_variable(variable, value)
        yield Cause(name=f"another variable for {name}", expected=V.CODE, training=training, later=later)
    state = (
        ("generator of the noise seeded anew", LIKING, fault("reseeded", 34)),
        ("a callback that seeds all generators", SORTING, fault("reseeded", 45)),
        ("the LR raised in memory", TYPING, fault("lr", 35)),
        ("the LR of the cosine overwritten", RATING, fault("lr", 36)),
    )
    for name, training, planted in state:
        yield Cause(name=name, expected=V.STATE, training=training, fault=planted)
    chance = (("bf16 sums in an order of chance", MIXING, fault("order", 0)), ("threads that race", PRICING, fault("race", 0)))
    for name, training, planted in chance:
        yield Cause(name=name, expected=V.RANDOM, training=training, fault=planted, stays=True)


def _of_people_on_call() -> Iterator[Cause]:
    hardware = (
        ("bit of one rank's activation", SENSING, fault("activation", 43, 2222)),
        ("a bit of a moment that is stuck", RATING, fault("moment", 34, 61)),
        ("a reduction that never came", SENSING, fault("unreduced", 46)),
        ("bit of the teacher's weights", LIKING, fault("teacher", 33, 40)),
    )
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)
    yield Cause(name="a worker with a page of zeros", expected=V.DATA, training=PRICING, fault=fault("worker", 34))
    # The vocabulary is a file that the script reads, and its effect is other tokens: both are said rightly.
    yield Cause(name="a vocabulary sorted anew", expected=V.DATA, also=V.CODE, training=SORTING, later=_sort_anew)
    yield Cause(name="a cache of features made anew", expected=V.DATA, training=RATING, later=_make_anew)
    yield Cause(name="a checkpoint written over", expected=V.STATE, training=MIXING, later=_write_over)
    # Set in the optimizer by hand, once; the script that is left knows nothing of it.
    yield Cause(name="weight decay raised in memory", expected=V.STATE, training=TYPING, fault=fault("decay", 34))
    trusted = edit("experiment.toml", "trust = 0.5", "trust = 0.6")
    yield Cause(name="a setting edited after the run", expected=V.CODE, training=LIKING, later=trusted)
    # No two replays agree; that the generator is another than the saved one is as true.
    clock = variant(LIKING, 'torch.set_rng_state(state["noise"])', "torch.manual_seed(time.time_ns() % 2**32)")
    yield Cause(name="noise seeded by the clock at a resume", expected=V.RANDOM, also=V.STATE, training=clock)
    # Every process hashes words in its own way: no two replays agree, and what differs first is the labels of the batch.
    hashed = variant(MIXING, 'sorted(path.name for path in Path("pictures").iterdir())', '[*{path.parent.name for path in '
                     'Path("pictures").glob("*/*")}]')  # fmt: skip
    yield Cause(name="classes in the order of a set", expected=V.RANDOM, also=V.DATA, training=hashed)


def _controls() -> Iterator[Cause]:
    yield Cause(name="nothing planted, accumulated", expected=V.REPRODUCED, training=RATING)
    outlier = Training(lay=_lay_outlier, command=PRICING.command, asked=PRICING.asked)
    yield Cause(name="a jump of the loss by one wild row", expected=V.REPRODUCED, training=outlier)
    yield Cause(name="another name, an old log put away", expected=V.REPRODUCED, training=TYPING, later=_put_away)
    # What the layer remembers goes from batch to batch and into no checkpoint: it may be that nothing on record tells of it.
    carried = variant(TYPING, "model(x)\n", "model(x, memory)\n    memory = memory.detach()\n")
    yield Cause(name="a memory that no checkpoint holds", expected=V.STATE, weaker=V.NOT_TOLD, training=carried)


def _draw_again(directory: Path, environ: dict[str, str]) -> None:
    """One of all the pictures; each is seen between the steps 43 and 56."""
    import numpy as np

    path = directory / "pictures/drum/007.npy"
    picture = np.load(path)
    picture[2:6, 2:6] = 255
    np.save(path, picture)


def _price(more: float, times: float) -> Later:
    """Another price in the row that step 36 reads as its fourth."""

    def later(directory: Path, environ: dict[str, str]) -> None:
        import torch

        epoch, place = divmod(35 * 16 + 3, 320)
        row = torch.randperm(320, generator=torch.Generator().manual_seed(90 + epoch)).tolist()[place]
        lines = (directory / "houses.csv").read_text().splitlines()
        *values, price = lines[row + 1].split(",")
        lines[row + 1] = ",".join((*values, f"{times * float(price) + more:.3f}"))
        (directory / "houses.csv").write_text("\n".join(lines) + "\n")

    return later


def _lay_outlier(directory: Path) -> None:
    lay_table(directory)
    _price(0, 500)(directory, {})


def _sort_anew(directory: Path, environ: dict[str, str]) -> None:
    """By length and no longer by letters; the first three stay."""
    words = (directory / "vocab.txt").read_text().split()
    (directory / "vocab.txt").write_text("\n".join((*words[:3], *sorted(words[3:], key=len))) + "\n")


def _make_anew(directory: Path, environ: dict[str, str]) -> None:
    """By a newer notebook, which weighs words by the logarithm."""
    import torch

    kept = directory / "cache/features-96.pt"
    features = torch.load(kept)
    torch.save({**features, "x": features["x"].mul(4).log1p()}, kept)


def _write_over(directory: Path, environ: dict[str, str]) -> None:
    """Somebody tried something with the head and saved under the old name."""
    import torch

    path = directory / "checkpoints/step-40.pt"
    state = torch.load(path, weights_only=False)
    state["model"]["head.weight"] *= 1.02
    torch.save(state, path)


def _put_away(directory: Path, environ: dict[str, str]) -> None:
    environ["LM_NAME"] = "char-gru-second-look"
    for name in ("history.csv", "run.log"):
        (directory / name).rename(directory / f"{name}.old")
