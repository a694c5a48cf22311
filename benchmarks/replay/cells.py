"""Every exact cell of `bit_transformer`: one process or two ranks, a way to shard, a precision, accumulation, what else.

Each is launched as a user does, with a save every four steps; three steps in a row, at a drawn place, are taken again from
the save before them and compared print by print. The cells are those of `tests/bit_transformer/test_exact_resume.py`: the whole
matrix on two ranks, and those beside it.
"""

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
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


def play(ranks: int, cell: Cell, step: int, directory: Path) -> tuple[str, str, bool]:
    """Record a cell, take three steps from `step` on again. Returns verdict, reason, and whether every byte is as it was."""
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
    out = in_chronicle(directory, environ, "replay", str(step), "--until", str(step + AGAIN - 1), *run, "--json", check=False)
    found = json.loads(out) if out.startswith("{") else {"verdict": "failed", "why": out[-300:]}
    steps = f" (from step {step}, {found.get('compared')} compared)"
    after = digests(directory)
    return found["verdict"], found["why"] + steps, all(after.get(path) == digest for path, digest in before.items())


def show(only: str, seconds: float, seed: int) -> int:
    """Print the table; stops to begin cells after so many seconds. Returns how many were not reproduced."""
    draw = random.Random(seed)
    begun, reproduced, played, touched = time.monotonic(), 0, 0, 0
    drawn = [(ranks, cell, draw.randint(SAVES + 1, WHOLE - AGAIN + 1)) for ranks, cell in cells()]
    asked = [(ranks, cell, step) for ranks, cell, step in drawn if only in f"{ranks} {cell}"]
    for ranks, cell, step in asked:
        if time.monotonic() - begun > seconds:
            break
        with tempfile.TemporaryDirectory() as name:
            verdict, why, whole = play(ranks, cell, step, Path(name).resolve())
        right = verdict == ReplayVerdict.REPRODUCED
        played, reproduced, touched = played + 1, reproduced + right, touched + (not whole)
        print(f"  {'ok   ' if right else 'WRONG'} {ranks} × {' '.join(map(str, cell)):24} {verdict}: {why[:140]}", flush=True)
    print(f"reproduced: {reproduced} of {played} played, {len(asked)} in all; runs that changed: {touched}")
    return played - reproduced
