"""How long `chronicle spikes` takes over a finished run of 500k steps and 8 channels, by two processes.

    python -m benchmarks.scan_speed [--steps 500000]

Writes the log into a temporary folder, runs the real command, and prints wall-clock time, CPU time of both processes
together, the most memory one of them held, and the load of the machine before it began. The goal is 15 s of wall clock
with two free cores; on a machine that is busy only the CPU time says something.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GOAL_SECONDS = 15.0
CHANNELS = ("loss", "lr", "grad_norm", "z_loss", "update_norm", "loss/web", "tokens_per_second", "loss_scale")


def write_log(path: Path, steps: int) -> None:
    """A healthy run with one spike, written down as a table."""
    rng = random.Random(3)
    with open(path, "w", encoding="utf-8") as log:
        log.write(f"step,{','.join(CHANNELS)}\n")
        for step in range(steps):
            loss = 2.0 + 6.0 / (1.0 + step / 500.0) + rng.gauss(0.0, 0.02) + 2.0 * (step == steps // 2)
            log.write(
                f"{step},{loss:.5f},{1e-3 * min(1.0, step / 2000):.6g},{rng.lognormvariate(0.0, 0.2):.5f},"
                f"{rng.gauss(1.0, 0.02):.5f},{rng.lognormvariate(-3.0, 0.1):.6f},{loss + rng.gauss(0.0, 0.02):.5f},"
                f"{rng.gauss(1000.0, 10.0):.2f},65536\n"
            )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scan_speed", description=__doc__)
    parser.add_argument("--steps", type=int, default=500_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.csv"
        write_log(path, steps)
        size, load, begin = path.stat().st_size, os.getloadavg()[0], time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "chronicle.cli.main", "spikes", str(path), "--json"], stdout=subprocess.PIPE, check=True
        )
        wall = time.monotonic() - begin
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    data = json.loads(done.stdout)
    print(f"{data['rows']} steps x {len(CHANNELS)} channels, {size / 1e6:.0f} MB, {len(data['events'])} events")
    print(f"wall {wall:.1f} s (goal {GOAL_SECONDS:.0f} s), {wall / GOAL_SECONDS:.2f} of the goal; load before {load:.1f}")
    print(f"CPU {cpu:.1f} s in both processes, {1e6 * cpu / (steps * len(CHANNELS)):.2f} µs a point and channel")
    print(f"most memory in one process: {used.ru_maxrss / 1024:.0f} MB")
    return 0 if data["rows"] == steps else 1


if __name__ == "__main__":
    raise SystemExit(main())
