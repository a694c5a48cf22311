"""What step prints cost: CPU time of a guarded step with and without them, and with a print of every step.

Equal models take turns in one process, block by block, so that a busy machine disturbs all alike. CPU time of the thread is
compared, not wall time: torch works with one thread here.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.envelope.cost import transformer
from benchmarks.envelope.flights import attached
from chronicle.replay.ring import read_ring, ring_path
from chronicle.resume.prints import PRINTS_VARIABLE

MODES = ("off", "", "every")
BLOCKS, STEPS = 16, 10
SIZES = ((64, 2, 2), (128, 4, 4), (256, 4, 8))  # width, layers, rows of 32


def measure(width: int, layers: int, rows: int) -> dict[str, float]:
    """Milliseconds of CPU a step without prints, the median ratios of blocks with them, and the share of printed steps."""
    spent: dict[str, list[float]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as directory:
        loops = {mode: _loop(Path(directory) / (mode or "auto"), width, layers, rows, mode) for mode in MODES}
        for loop in loops.values():
            for _ in range(2 * STEPS):
                loop()
        for block in range(BLOCKS):
            for mode in MODES[block % 3 :] + MODES[: block % 3]:
                begun = time.thread_time()
                for _ in range(STEPS):
                    loops[mode]()
                spent[mode].append(time.thread_time() - begun)
        for loop in loops.values():
            loop.run.session.prints.finish()  # type: ignore[attr-defined]
        printed = len(read_ring(ring_path(Path(directory) / "auto" / "launch", 0)).prints)
    ratios = {mode: statistics.median(a / b for a, b in zip(spent[mode], spent["off"], strict=True)) for mode in MODES}
    return {
        "step": 1e3 * statistics.median(spent["off"]) / STEPS,
        "auto": ratios[""],
        "every": ratios["every"],
        "printed": printed / ((BLOCKS + 2) * STEPS),
    }


def _loop(directory: Path, width: int, layers: int, rows: int, mode: str) -> Callable[[], None]:
    torch.manual_seed(0)
    model = transformer(width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    os.environ |= {"CHRONICLE_LAUNCH_DIR": str(directory / "launch"), PRINTS_VARIABLE: mode}
    run = attached(directory, model, optimizer)
    del os.environ["CHRONICLE_LAUNCH_DIR"], os.environ[PRINTS_VARIABLE]
    x = torch.randn(rows, 32, width)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step.run = run  # type: ignore[attr-defined]  # kept alive with the loop
    return step


def show() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("CPU of a step, prints as often as they may be, and of every step (ratios to none); share of steps that have one")
    for width, layers, rows in SIZES:
        found = measure(width, layers, rows)
        print(
            f"  width {width:4} × {layers} layers  {found['step']:7.2f} ms  as it is {found['auto']:.4f} "
            f"({found['printed']:.0%} of the steps)  every step {found['every']:.4f}",
            flush=True,
        )
