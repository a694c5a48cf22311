"""What step prints cost: CPU time of a guarded step with and without them, and with a print of every step.

Equal models take turns in one process, block by block, so that a busy machine disturbs all alike. CPU time of the thread is
compared, not wall time: torch works with one thread here. The prints' own clock stands still while the others have their turn:
they would take a step for longer than it is, and print too often. Then a replay, by the clock, beside the launch it repeats.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import chronicle
from benchmarks.replay.causes import in_chronicle, quiet
from chronicle.prints.ring import read_ring, ring_path
from chronicle.prints.step_prints import PRINTS_VARIABLE

MODES = ("off", "", "every")
BLOCKS, SECONDS = 24, 0.5  # of steps in one block
SIZES = ((64, 2, 2), (128, 4, 4), (256, 4, 8))  # width, layers, rows of 32


def transformer(width: int, layers: int) -> torch.nn.Module:
    """A small encoder with a head."""
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    body = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return torch.nn.Sequential(body, torch.nn.Linear(width, 16))


def measure(width: int, layers: int, rows: int) -> dict[str, float]:
    """Milliseconds of CPU a step without prints, the median ratios of blocks with them, and the share of printed steps."""
    spent: dict[str, list[float]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as directory:
        loops = {mode: Loop(Path(directory) / (mode or "auto"), width, layers, rows, mode) for mode in MODES}
        steps = max(10, int(SECONDS / (loops["off"].take(20) / 20)))
        for loop in loops.values():
            loop.take(steps)
        before = loops[""].num_prints()
        for block in range(BLOCKS):
            for mode in MODES[block % 3 :] + MODES[: block % 3]:
                spent[mode].append(loops[mode].take(steps))
        printed = loops[""].num_prints() - before
    ratios = {mode: [a / b for a, b in zip(spent[mode], spent["off"], strict=True)] for mode in MODES}
    low, _, high = statistics.quantiles(ratios[""], n=4)
    return {
        "step": 1e3 * statistics.median(spent["off"]) / steps,
        "auto": statistics.median(ratios[""]),
        "low": low,
        "high": high,
        "every": statistics.median(ratios["every"]),
        "printed": printed / (BLOCKS * steps),
    }


class Loop:
    """A guarded training of its own, with a clock that goes only while it trains."""

    def __init__(self, directory: Path, width: int, layers: int, rows: int, mode: str) -> None:
        torch.manual_seed(0)
        self.model = transformer(width, layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.directory, self.x, self.spent, self.begun = directory / "launch", torch.randn(rows, 32, width), 0.0, 0.0
        os.environ |= {"CHRONICLE_LAUNCH_DIR": str(self.directory), PRINTS_VARIABLE: mode}
        self.run = chronicle.attach(directory / "run", self.model, self.optimizer)
        del os.environ["CHRONICLE_LAUNCH_DIR"], os.environ[PRINTS_VARIABLE]
        self.run.session.prints._clock = lambda: self.spent + time.perf_counter() - self.begun

    def take(self, steps: int) -> float:
        """So many steps; seconds of CPU that they took."""
        self.begun, cpu = time.perf_counter(), time.thread_time()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(self.x).square().mean().backward()
            self.optimizer.step()
        self.spent += time.perf_counter() - self.begun
        return time.thread_time() - cpu

    def num_prints(self) -> int:
        """How many steps have a print."""
        self.run.session.prints.finish()
        return len(read_ring(ring_path(self.directory, 0)).prints)


WIDE = """
import sys, torch, chronicle
from benchmarks.replay.cost import transformer
torch.set_num_threads(1); torch.manual_seed(0)
model = transformer(128, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
run = chronicle.attach(None, model, optimizer)
x = torch.randn(4, 32, 128)
for step in range(1, int(sys.argv[1]) + 1):
    loss = model(x).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    run.log(step=step, loss=loss.item())
"""


def again(steps: int = 400) -> tuple[float, float, float, str]:
    """Seconds of a launch of one step, of all steps, and of a replay of all; what the replay said.

    A launch before them compiles what is not compiled yet.
    """
    environ = quiet() | {"PYTHONPATH": os.getcwd()}
    environ.pop(PRINTS_VARIABLE)
    seconds = []
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place).resolve()
        (directory / "wide.py").write_text(WIDE)
        for name, number in (("first", 1), ("one", 1), ("all", steps)):
            begun = time.perf_counter()
            in_chronicle(directory, environ, "run", "--run", name, "--", sys.executable, "wide.py", str(number))
            seconds.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        said = in_chronicle(directory, environ, "replay", "1", "--until", str(steps), "--run", "all", check=False)
        return seconds[1], seconds[2], time.perf_counter() - begun, said.splitlines()[0]


def show() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    print("CPU of a step, prints as often as they may be, and of every step (ratios to none); share of steps that have one")
    for width, layers, rows in SIZES:
        found = measure(width, layers, rows)
        print(
            f"  width {width:4} × {layers} layers  {found['step']:7.2f} ms  as it is {found['auto']:.4f} "
            f"[{found['low']:.4f}–{found['high']:.4f}] ({found['printed']:.1%} of the steps)  every step {found['every']:.4f}",
            flush=True,
        )
    start, launch, replay, said = again()
    own = launch - start
    print(f"a replay of 400 steps: {replay:.1f} s; the launch {launch:.1f} s, of which its start {start:.1f} s", flush=True)
    print(f"  less one start, {(replay - start) / own:.2f} times the steps' own {own:.1f} s ({said})")
