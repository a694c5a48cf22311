"""What supervision costs: time until the trainer's first line, and CPU while it runs.

    python benchmarks/launch_overhead.py

Prints: milliseconds of fork and tagging (environment, fork, exec of the launcher) inside a supervisor that is up, the same
for a bare `subprocess.Popen`, start-up of `chronicle run` as a whole, and the supervisor's CPU share while a trainer logs
ten lines and one metrics line a second. Source of the limits: issue "launching", 30 ms and 0.5 %.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from chronicle.launch.containment import die_with_parent
from chronicle.launch.launchers import build_environment

ROUNDS = 30
RUN_SECONDS = 60
TRAINER = """
import os, time
from pathlib import Path
from chronicle.metrics.log import MetricsWriter
begin, step = time.time(), 0
with MetricsWriter(Path(os.environ["CHRONICLE_LAUNCH_DIR"]) / "metrics.jsonl") as log:
    while time.time() - begin < float(os.environ["SECONDS"]):
        step += 1
        log.write(step, {"loss": 2.0, "lr": 1e-3, "grad_norm": 1.0})
        for _ in range(10):
            print("step", step)
            time.sleep(0.1)
"""


def main() -> None:
    """Run all three measurements."""
    bare = [_start_seconds(supervised=False) for _ in range(ROUNDS)]
    ours = [_start_seconds(supervised=True) for _ in range(ROUNDS)]
    tagged, plain = statistics.median(ours) * 1e3, statistics.median(bare) * 1e3
    print(f"fork and tagging: {tagged:.1f} ms, bare {plain:.1f} ms: +{tagged - plain:.1f} ms")
    with tempfile.TemporaryDirectory() as directory:
        print(f"`chronicle run -- true` as a whole: {_whole_seconds(Path(directory)) * 1e3:.0f} ms")
        print(f"CPU while running: {_cpu_share(Path(directory)):.2%} of one core over {RUN_SECONDS} s")


def _start_seconds(*, supervised: bool) -> float:
    begin = time.perf_counter()
    environ = dict(os.environ)
    if supervised:
        environ = build_environment(
            environ, run="r", run_dir=Path("/tmp/r"), launch=1, launch_dir=Path("/tmp/r/1"), token="0" * 32,
            grace_seconds=90.0, output_address=None, checkpoints_dir=None,
        )  # fmt: skip
    prepare = die_with_parent() if supervised else None
    child = subprocess.Popen(["true"], env=environ, start_new_session=True, preexec_fn=prepare)
    elapsed = time.perf_counter() - begin  # Popen returns once exec has happened
    child.wait()
    return elapsed


def _whole_seconds(directory: Path) -> float:
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        subprocess.run(_command("whole", "true"), cwd=directory, check=True, capture_output=True)
        times.append(time.perf_counter() - begin)
    return min(times)


def _cpu_share(directory: Path) -> float:
    environ = os.environ | {"SECONDS": str(RUN_SECONDS + 5)}
    command = _command("cpu", sys.executable, "-c", TRAINER)
    child = subprocess.Popen(command, cwd=directory, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(4.0)  # start-up is the other number
    before = _cpu_seconds(child.pid)
    time.sleep(RUN_SECONDS)
    share = (_cpu_seconds(child.pid) - before) / RUN_SECONDS
    child.wait()
    return share


def _command(run: str, *launcher: str) -> list[str]:
    return [sys.executable, "-m", "chronicle.cli.main", "run", "--run", run, "--", *launcher]


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
