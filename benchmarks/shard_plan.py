"""Speed of a plan over foreign tars, beside bare webdataset on the same shards in the same process, in turns.

    python benchmarks/shard_plan.py

Prints samples a CPU second of both (median of turns, both decode nothing), ids a second, the time of a seek to step 10⁶, and
the size of an index of 10⁴ shards.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import webdataset

from benchmarks.elastic_data import write_foreign_tars
from chronicle.data.plan_dataset import PlanDataset
from chronicle.data.shard_index import IndexedShard, SourceIndex, index_source, write_source_index

TURNS, SAMPLES = 7, 3000


def cpu(work: Callable[[], Iterable[object]]) -> float:
    """Return the CPU seconds of reading all that `work` yields."""
    started = time.process_time()
    for _ in work():
        pass
    return time.process_time() - started


def main() -> int:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        write_foreign_tars(place, shards=10, samples=200)
        index = index_source("web", place / "web")
        paths = [str(path) for path in sorted((place / "web").glob("*.tar"))]
        data = PlanDataset([index], seed=0)
        ours, theirs = [], []
        for _ in range(TURNS):
            ours.append(cpu(lambda: islice(data.stream(), SAMPLES)))
            theirs.append(cpu(lambda: islice(webdataset.WebDataset(paths, shardshuffle=100).shuffle(1000).repeat(), SAMPLES)))
        one, other = statistics.median(ours), statistics.median(theirs)
        print(f"samples a CPU second: plan {SAMPLES / one:,.0f}, webdataset {SAMPLES / other:,.0f}, ratio {other / one:.2f} "
              f"(median of {TURNS} turns of {SAMPLES})")
        started = time.process_time()
        data.ids(0, 1_000_000)
        print(f"ids a CPU second: {1e6 / (time.process_time() - started):,.0f}")
        seeks = []
        for step in range(1_000_000, 1_000_020):
            started = time.process_time()
            data.ids(step * 1000, 256)
            seeks.append(1e3 * (time.process_time() - started))
        print(f"seek to step 10^6 of 1,000 samples: median {statistics.median(seeks):.2f} ms, worst {max(seeks):.2f} ms of CPU")
        draw, count = np.random.default_rng(0), 10_000_000
        many = SourceIndex(source="many", root="/shards", shards=tuple(
            IndexedShard(name=f"part-{number:06d}.tar", kind="tar", size_bytes=1, num_samples=1000, sha256=f"{number:064x}")
            for number in range(10_000)), sizes=512 * draw.integers(4, 60, count),
            checksums=draw.integers(0, 2**32, count, np.uint32))
        write_source_index(many, place / "many.index")
        print(f"index of 10^4 shards with 10^7 samples: {(place / 'many.index').stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
