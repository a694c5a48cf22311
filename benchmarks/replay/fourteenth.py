"""Planted causes on eight trainings: MAML, a codebook, an agent, speech, `fully_shard`, HF, Lightning, a memory.

The fourteenth list, written on 27 November 2026 by someone who had read what the issue asks and not how replay
answers; frozen before it was played. Twenty-four plays are of the kinds that the issue names, twelve are such as
happen to people on call, and four are controls, in which a machine is never to blame. The eight trainings
(`fourteenth_trainings.py`) were seen to resume to the bit, and every fault and change to alter what is trained, in
plain runs without `chronicle run`.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.replay.causes import Cause, Training, edit, set_variable, upgrade
from benchmarks.replay.eighth import TORCHRUN
from benchmarks.replay.fourteenth_trainings import (
    REVERSAL,
    lay_agent,
    lay_codes,
    lay_curves,
    lay_domains,
    lay_memory,
    lay_scores,
    lay_sharded,
    lay_speech,
)
from benchmarks.replay.planting import fault
from chronicle.replay.verdict import ReplayVerdict as V

PYTHON = [sys.executable, "train.py"]
CURVES = Training(lay=lay_curves, command=[*PYTHON, "--steps", "45"], asked=37)
CODES = Training(lay=lay_codes, command=PYTHON, asked=38)
AGENT = Training(lay=lay_agent, command=[*PYTHON, "--total-updates", "45"], asked=36)
SPEECH = Training(lay=lay_speech, command=[*PYTHON, "data", "--update-freq", "2"], asked=37)
SHARDED = Training(lay=lay_sharded, command=[*TORCHRUN, "train.py", "job.toml"], asked=38)
SCORES = Training(lay=lay_scores, command=[*PYTHON, "arguments.json"], asked=47)
# Lightning's `global_step`, after which the log and the checkpoints go, counts both optimizers: this is the 37th batch,
# seven after a save. The steps of its faults are batches.
DOMAINS = Training(lay=lay_domains, command=PYTHON, asked=74)
MEMORY = Training(lay=lay_memory, command=PYTHON, asked=36)
# what is read at step 34: a sound, an utterance, a curve
SOUND, UTTERANCE, CURVE = 95, "utt0071", 80


# ---- what is planted -------------------------------------------------------------------------------------------------


def causes() -> Iterator[Cause]:
    """All of them: first those that the issue names, then others, then those where no machine is to blame."""
    yield from _of_the_issue()
    yield from _of_people_on_call()
    yield from _controls()


def _of_the_issue() -> Iterator[Cause]:
    hardware = (
        ("bit of one rank's part of a gradient", SHARDED, fault("gradient", 35, 333)),
        ("bit of the gradient of a decoder", CODES, fault("gradient", 34, 410)),
        ("bit of a clipped gradient under Adafactor", SCORES, fault("gradient", 44, 700)),
        ("bit of a weight from which others are learned", CURVES, fault("weight", 34, 517)),
        ("bit of a weight of one of two critics", AGENT, fault("weight", 33, 222)),
        ("slow poison of features over 20 steps", DOMAINS, fault("poison", 18, 100)),
    )
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)
    data = (
        ("bit of a reward among those drawn", AGENT, fault("reward", 34, 7)),
        ("bit of a word in its column", MEMORY, fault("token", 33, 20)),
        ("tasks of two steps exchanged", CURVES, fault("swapped", 33)),
        ("a row of one rank taken twice", SHARDED, fault("rows", 34)),
    )
    for name, training, planted in data:
        yield Cause(name=name, expected=V.DATA, training=training, fault=planted)
    yield Cause(name="a sound recorded anew", expected=V.DATA, training=CODES, later=_record_anew)
    yield Cause(name="what was said, corrected", expected=V.DATA, training=SPEECH, later=_correct)
    shrunk = edit("inner.py", "name: weight - paces", "name: 0.999 * weight - paces")
    yield Cause(name="a line of the inner steps", expected=V.CODE, training=CURVES, later=shrunk)
    wider = edit("corpus.py", "sound[begin : begin + 4] = 0", "sound[begin : begin + 5] = 0")
    yield Cause(name="a line that a worker runs", expected=V.CODE, training=SPEECH, later=wider)
    nearer = upgrade("vendor/vqkit", "0.6.0", "0.7.0", "NEAR = 0.25", "NEAR = 0.3")
    yield Cause(name="another version of the codebook", expected=V.CODE, training=CODES, later=nearer)
    # What is seen and got is another, too, but only because the package of the world is.
    thicker = upgrade("third_party/springworld", "1.4.2", "1.5.0", "DRAG = 0.12", "DRAG = 0.2")
    yield Cause(name="another version of the world", expected=V.CODE, training=AGENT, later=thicker)
    variables = (
        ("the memory's jumps", MEMORY, "AWD_BETA", "3.0"),
        ("the labels' power", SCORES, "SCORE_SHARPEN", "1.5"),
    )
    for name, training, variable, value in variables:
        later = set_variable(variable, value)
        yield Cause(name=f"another variable for {name}", expected=V.CODE, training=training, later=later)
    state = (
        ("NumPy's Philox seeded anew among tasks", CURVES, fault("reseeded", 34)),
        ("torch seeded anew on one rank of two", SHARDED, fault("reseeded", 34)),
        ("the LR of one step under Adafactor", SCORES, fault("lr", 45)),
        ("the LR of a temperature by hand", AGENT, fault("lr", 33)),
    )
    for name, training, planted in state:
        yield Cause(name=name, expected=V.STATE, training=training, fault=planted)
    planted = fault("order", 0)
    yield Cause(name="codes averaged as they come", expected=V.RANDOM, training=CODES, fault=planted, stays=True)
    clock = replace(SPEECH, lay=_lay_clock)
    yield Cause(name="masks that a worker draws by the clock", expected=V.RANDOM, training=clock)


def _of_people_on_call() -> Iterator[Cause]:
    hardware = (
        ("bit of a code of the codebook", CODES, fault("codebook", 35, 130)),
        ("bit of the moment of an actor", AGENT, fault("moment", 35, 301)),
        ("bit of an activation in sixteen bits", SPEECH, fault("activation", 35, 900)),
        ("one rank's part of an update made twice", SHARDED, fault("twice", 36)),
    )
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)
    # The state goes on in memory and is given to the model with the words: that it was given something else is as true.
    yield Cause(name="bit of a state that goes on", expected=V.HARDWARE, also=V.DATA, training=MEMORY,
                fault=fault("hidden", 34, 130))  # fmt: skip
    data = (
        ("a priority a thousand times too high", AGENT, fault("priority", 33, 60)),
        ("sounds padded with their end", SPEECH, fault("padded", 34)),
        ("the other lab's batch of the step before", DOMAINS, fault("before", 34)),
    )
    for name, training, planted in data:
        yield Cause(name=name, expected=V.DATA, training=training, fault=planted)
    yield Cause(name="clients weighed anew in their table", expected=V.DATA, training=SCORES, later=_weigh_anew)
    slower = edit("job.toml", "rope = 500.0", "rope = 400.0")
    yield Cause(name="a setting of the job edited after it", expected=V.CODE, training=SHARDED, later=slower)
    yield Cause(name="an optional module that came after the run", expected=V.CODE, training=DOMAINS, later=_install)
    yield Cause(
        name="a checkpoint with the state before last", expected=V.STATE, training=MEMORY, fault=fault("stale", 30)
    )


def _controls() -> Iterator[Cause]:
    yield Cause(name="nothing planted, two optimizers by hand", expected=V.REPRODUCED, training=DOMAINS)
    wild = replace(CURVES, lay=_lay_wild, asked=34)
    yield Cause(name="a jump of the loss by one wild curve", expected=V.REPRODUCED, training=wild)
    yield Cause(name="a table packed in another way", expected=V.REPRODUCED, training=SCORES, later=_pack)
    yield Cause(name="a cache thrown away, a comment", expected=V.REPRODUCED, training=MEMORY, later=_tidy_up)


def _record_anew(directory: Path, environ: dict[str, str]) -> None:
    """One sound, a little louder and with an offset; the file is as long as it was."""
    import numpy as np

    sounds = np.fromfile(directory / "data/sounds.f32", dtype=np.float32).reshape(-1, 64)
    sounds[SOUND] = 1.2 * sounds[SOUND] + 0.1
    sounds.tofile(directory / "data/sounds.f32")


def _correct(directory: Path, environ: dict[str, str]) -> None:
    path = directory / "data/train.tsv"
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    for row in rows:
        if row[0] == UTTERANCE:
            row[2] = row[2][:4] + "t" + row[2][5:]
    path.write_text("\n".join("\t".join(row) for row in rows) + "\n")


def _lay_clock(directory: Path) -> None:
    lay_speech(directory)
    edit("corpus.py", "import random\n", "import random, time\n", "default_rng((self.seed, epoch, row))",
         "default_rng(time.time_ns())")(directory, {})  # fmt: skip


def _weigh_anew(directory: Path, environ: dict[str, str]) -> None:
    """Those of one product count no more and no less than others."""
    import pandas as pd

    frame = pd.read_parquet(directory / "clients.parquet")
    frame.loc[frame["product"] == 2, "weight"] = 1.0
    frame.to_parquet(directory / "clients.parquet", index=False)


def _install(directory: Path, environ: dict[str, str]) -> None:
    """The script takes it, if it is there; it turns a little more."""
    (directory / "fastflip.py").write_text(REVERSAL.replace("-ctx.strength", "-1.1 * ctx.strength"))


def _lay_wild(directory: Path) -> None:
    """A sensor that was set ten times too sensitive for one curve of step 34."""
    import numpy as np

    lay_curves(directory)
    with np.load(directory / "curves.npz") as held:
        x, y = held["x"], held["y"]
    y[CURVE] *= 10
    np.savez(directory / "curves.npz", x=x, y=y)


def _pack(directory: Path, environ: dict[str, str]) -> None:
    """The same values in other bytes."""
    import pandas as pd

    frame = pd.read_parquet(directory / "clients.parquet")
    frame.to_parquet(directory / "clients.parquet", index=False, compression="gzip")


def _tidy_up(directory: Path, environ: dict[str, str]) -> None:
    """The corpus is read anew from the same text."""
    for path in directory.glob("corpus.*.data"):
        path.unlink()
    told = edit("train.py", "# Activation and temporal activation regularization", "# AR and TAR, as Merity has them")
    told(directory, environ)
