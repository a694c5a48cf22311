"""What `chronicle verify` with checksums reads per second: one torch zip, and a whole checkpoint with its manifest.

Prints GB/s a core (processor time) and GB/s over all cores (wall time, page cache warm). Files lie in a temporary
directory (`--dir` to choose it) and are removed.

    python -m benchmarks.verify_speed [--gigabytes 2] [--dir DIR]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.inspect_speed import MAKE_LARGE
from rollback.checkpoint.listing import open_checkpoint
from rollback.checkpoint.manifest import write_manifest
from rollback.checks.verify import verify_checkpoint
from rollback.errors import Severity


def measured(path: Path, label: str) -> None:
    checkpoint = open_checkpoint(path)
    for threads in (1, os.cpu_count() or 1):
        best_wall, best_cpu = float("inf"), float("inf")
        for _ in range(3):
            before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            with ThreadPoolExecutor(threads) as executor:
                findings = verify_checkpoint(checkpoint, full=True, executor=executor)
            after = resource.getrusage(resource.RUSAGE_SELF)
            assert not [f for f in findings if f.severity is Severity.ERROR and f.check == "F3"], findings
            best_wall = min(best_wall, time.perf_counter() - started)
            best_cpu = min(best_cpu, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        size = checkpoint.size_bytes / 1e9
        print(f"  {label:<22} {threads} threads  {size / best_cpu:5.2f} GB/s a core  {size / best_wall:5.2f} GB/s in all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--dir", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.dir) as name:
        large = Path(name) / "large.pt"
        subprocess.run([sys.executable, "-c", MAKE_LARGE, large, str(chosen.gigabytes)], check=True)
        print(f"{large.stat().st_size / 1e9:.2f} GB, {os.cpu_count()} cores, best of three, page cache warm")
        measured(large, "records of a torch zip")
        folder = Path(name) / "checkpoint-30500"
        folder.mkdir()
        large.rename(folder / "optimizer.pt")
        write_manifest(folder, step=30500)
        measured(folder, "files of a manifest")


if __name__ == "__main__":
    main()
