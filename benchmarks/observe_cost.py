"""What `observe` costs a sample, and what 10⁸ keys of earlier launches cost at the start.

    python -m benchmarks.observe_cost

Prints microseconds of CPU a sample over a bare loop (single samples with text keys, batches of 256 text keys, batches of 256
whole numbers), the CPU seconds from the first sample to the first written account with 10⁸ keys of an earlier launch, and how
much memory the process took for it. The keys of that launch are random and unsorted, as a launch leaves them, and their file
is in the page cache: what a disk takes comes on top.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from chronicle.data import observe

SAMPLES, KEYS = 400_000, 100_000_000


def cost(samples: Sequence[object], number: int, place: Path) -> float:
    """Return microseconds of CPU a sample, less a bare loop's."""
    started = time.process_time()
    for _ in samples:
        pass
    bare = time.process_time() - started
    started = time.process_time()
    for _ in observe(samples, place, key=lambda sample: sample, source=lambda sample: "web", launch=1):
        pass
    return 1e6 * (time.process_time() - started - bare) / number


def _resident() -> int:
    """Return the bytes that this process holds in memory (proc(5))."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return 1024 * int(line.split()[1])


def main() -> int:
    """Print the figures."""
    texts = [f"shard-{number // 1000:06d}/{number % 1000:06d}" for number in range(SAMPLES)]
    numbers = np.arange(SAMPLES)
    forms = {"single samples, text keys": texts,
             "batches of 256, text keys": [texts[first:first + 256] for first in range(0, SAMPLES, 256)],
             "batches of 256, whole numbers": [numbers[first:first + 256] for first in range(0, SAMPLES, 256)]}
    for name, samples in forms.items():
        with tempfile.TemporaryDirectory() as place:
            print(f"{name}: {cost(samples, SAMPLES, Path(place)):.2f} µs a sample")
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        draw = np.random.default_rng(0)
        with (place / "keys-0001-rank-0.bin").open("wb") as stream:
            for _ in range(100):
                stream.write(draw.integers(0, 2**63, KEYS // 100, np.uint64).tobytes())
        np.fromfile(place / "keys-0001-rank-0.bin", np.uint8).max()  # from here on the file lies in memory
        before = _resident()
        started = time.process_time()
        loader = observe(range(512), place, key=lambda sample: sample, source=lambda sample: "web", launch=2)
        list(loader)
        spent = time.process_time() - started
        print(f"start with {KEYS:,} keys: {spent:.2f} s of CPU, {(_resident() - before) / 1e9:.2f} GB more memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
