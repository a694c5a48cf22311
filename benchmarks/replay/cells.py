"""Every exact cell of `bit_transformer`: one process or two ranks, a way to shard, a precision, accumulation, what else.

Each is launched as a user does, with a save every four steps; three drawn steps are taken again, each by a replay of its own
from the save before it, and compared print by print. The cells are those of `tests/bit_transformer/test_exact_resume.py`: the
whole matrix on two ranks, and those beside it.
"""

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from benchmarks.replay.causes import digests, in_chronicle, quiet
from chronicle.replay.verdict import ReplayVerdict
from tests.bit_transformer.launches import TINY
from tests.bit_transformer.test_exact_resume import EXTRA, KINDS, MORE, SINGLE, VARIANTS, Cell

SAVES, WHOLE, AGAIN = 4, 14, 3


def cells() -> Iterator[tuple[int, Cell]]:
    """(number of ranks, cell), without a cell twice."""
    for sharding, (precision, accumulation, extra) in product([kind for kind in KINDS if kind != "single"], VARIANTS):
        yield 2, (sharding, precision, accumulation, extra)
    for precision, accumulation, extra in VARIANTS:
        yield 1, ("ddp", precision, accumulation, extra)
    yield from ((1, cell) for cell in SINGLE if cell[3] not in ("ramp", "act"))
    yield from ((2, cell) for cell in (*MORE, ("ddp", "no", 4, "all")))


def play(ranks: int, cell: Cell, steps: Sequence[int], directory: Path) -> tuple[int, str, bool]:
    """Record a cell, take these steps again. Returns how many are reproduced, why not, and whether every byte is as it was."""
    sharding, precision, accumulation, extra = cell
    tiny = [word for word in TINY if not word.startswith("checkpoint_every")]
    settings = [*tiny, f"sharding={sharding}", f"mixed_precision={precision}", f"accumulation_steps={accumulation}",
                f"total_steps={WHOLE}", f"checkpoint_every={SAVES}", *EXTRA[extra]]  # fmt: skip
    environ = quiet()
    run = ["--run", "cell", "--logs", "logs", "--checkpoints", "checkpoints"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    trainer = ["-m", "bit_transformer.train", "--recipe", "demo", "--checkpoints", "checkpoints"]
    words = [word for setting in settings for word in ("--set", setting)]
    in_chronicle(directory, environ, "run", *run, "--", *(launcher if ranks > 1 else [sys.executable]), *trainer, *words)
    before = digests(directory)
    good, words = 0, []
    for step in steps:
        out = in_chronicle(directory, environ, "replay", str(step), *run, "--json", check=False)
        found = json.loads(out) if out.startswith("{") else {"verdict": "failed", "why": out[-300:], "compared": 0}
        is_good = found["verdict"] == ReplayVerdict.REPRODUCED and step in range(found["start"] + 1, found["until"] + 1)
        good += is_good
        words += [] if is_good else [f"step {step}: {found['verdict']}: {found['why']}"]
    after = digests(directory)
    return good, "; ".join(words), all(after.get(path) == digest for path, digest in before.items())


def show(only: str, seconds: float, seed: int) -> int:
    """Print the table; stops to begin cells after so many seconds. Returns how many were not reproduced."""
    draw = random.Random(seed)
    begun, reproduced, played, touched = time.monotonic(), 0, 0, 0
    drawn = [(ranks, cell, sorted(draw.sample(range(SAVES + 1, WHOLE + 1), AGAIN))) for ranks, cell in cells()]
    asked = [(ranks, cell, steps) for ranks, cell, steps in drawn if only in f"{ranks} {cell}"]
    for ranks, cell, steps in asked:
        if time.monotonic() - begun > seconds:
            break
        with tempfile.TemporaryDirectory() as name:
            good, why, whole = play(ranks, cell, steps, Path(name).resolve())
        played, reproduced, touched = played + AGAIN, reproduced + good, touched + (not whole)
        label = "ok   " if good == AGAIN and whole else "WRONG"
        print(f"  {label} {ranks} × {' '.join(map(str, cell)):24} steps {steps}: {good} reproduced {why[:200]}", flush=True)
    print(f"reproduced: {reproduced} of {played} steps played, {AGAIN * len(asked)} in all; runs that changed: {touched}")
    return played - reproduced
