"""What the flight envelope costs: CPU time of a step with and without it, and of its look at a save beside the fingerprint.

Two equal models take turns in one process, block by block, so that a busy machine disturbs both alike. CPU time of the thread
is compared, not wall time: torch works with one thread here.
"""

import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.envelope.flights import attached

BLOCKS, STEPS = 24, 20


def transformer(width: int, layers: int) -> torch.nn.Module:
    """A small encoder with a head."""
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    body = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return torch.nn.Sequential(body, torch.nn.Linear(width, 16))


def measure_steps(width: int, layers: int, rows: int, *, blocks: int = BLOCKS, steps: int = STEPS) -> tuple[float, float]:
    """Milliseconds of CPU a step without the envelope, and the median ratio of the blocks with and without it."""
    with tempfile.TemporaryDirectory() as directory:
        loops = [_loop(Path(directory) / str(on), width, layers, rows, on=on) for on in (False, True)]
        for loop in loops:
            for _ in range(steps):
                loop()
        ratios, plain = [], []
        for block in range(blocks):
            spent = {}
            for on in (False, True) if block % 2 else (True, False):
                begun = time.thread_time()
                for _ in range(steps):
                    loops[on]()
                spent[on] = time.thread_time() - begun
            ratios.append(spent[True] / spent[False])
            plain.append(spent[False] / steps)
    return 1e3 * statistics.median(plain), statistics.median(ratios)


def _loop(directory: Path, width: int, layers: int, rows: int, *, on: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model = transformer(width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run = attached(directory, model, optimizer)
    if not on:
        run.session.envelope.end()
        run.session.envelope.off = True
    x = torch.randn(rows, 32, width)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step.run = run  # type: ignore[attr-defined]  # kept alive with the loop
    return step


def measure_save(width: int, layers: int, *, times: int = 9) -> dict[str, float]:
    """CPU milliseconds of a save into memory, of the description, and of the envelope in it; millions of parameters."""
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        model = transformer(width, layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        run = attached(Path(directory), model, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(1, 8, width)).square().mean().backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": torch.optim.Optimizer.state_dict(optimizer)}
        state["optimizer"].pop("chronicle", None)
        found = {
            "save": _median(lambda: torch.save(state, io.BytesIO()), times),
            "description": _median(run.session.describe, times),
            "envelope": _median(run.session.envelope.at_save, times),
        }
        run.session.envelope.end()
    return {**found, "parameters": sum(p.numel() for p in model.parameters()) / 1e6}


def _median(work: Callable[[], Any], times: int) -> float:
    spent = []
    for _ in range(times):
        begun = time.thread_time()
        work()
        spent.append(time.thread_time() - begun)
    return 1e3 * statistics.median(spent)
