"""What one step costs a trainer: our metrics line, our journal entry, and `mlflow.log_metrics` into SQLite, in one run.

    python benchmarks/story/append.py [LINES]
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from chronicle.journal import JournalWriter
from chronicle.metrics import MetricsWriter
from chronicle.paths import RunPaths

VALUES = dict.fromkeys(("loss", "lr", "grad_norm", "a", "b", "c", "d", "e"), 1.234567)


def microseconds(action: Callable[[int], object], count: int) -> tuple[float, float]:
    """Median and 99th percentile of one call."""
    times = []
    for index in range(count):
        begin = time.perf_counter_ns()
        action(index)
        times.append((time.perf_counter_ns() - begin) / 1000)
    return statistics.median(times), sorted(times)[int(0.99 * count)]


def main() -> None:
    """Print one line each and the ratio of the medians."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    with tempfile.TemporaryDirectory() as directory:
        with MetricsWriter(Path(directory) / "metrics.jsonl") as log:
            own = microseconds(lambda step: log.write(step, VALUES), count)
        print(f"metrics line, 8 channels     median {own[0]:9.1f} µs   p99 {own[1]:9.1f} µs   ({count} lines)")
        with JournalWriter(RunPaths(Path(directory) / "r")) as writer:
            entry = microseconds(lambda step: writer.append("note", step=step, title="x"), 300)
        print(f"journal entry, fsynced       median {entry[0]:9.1f} µs   p99 {entry[1]:9.1f} µs   (300 entries)")
        try:
            import mlflow
        except ModuleNotFoundError:
            print("mlflow is not installed: nothing to compare with")
            return
        mlflow.set_tracking_uri(f"sqlite:///{directory}/mlflow.db")
        with mlflow.start_run():
            theirs = microseconds(lambda step: mlflow.log_metrics(VALUES, step=step), 100)
        print(f"mlflow.log_metrics, SQLite   median {theirs[0]:9.1f} µs   p99 {theirs[1]:9.1f} µs   (100 calls)")
        print(f"ratio of the medians         {theirs[0] / own[0]:.0f}")


if __name__ == "__main__":
    main()
