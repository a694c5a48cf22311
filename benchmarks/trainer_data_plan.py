"""The data plan in numbers: ids a second, time to the first batch at step 1,000,000, memory at 1e8 samples.

    python benchmarks/trainer_data_plan.py
"""

from __future__ import annotations

import json
import resource
import time

from chronicle.data import DataPlan, Segments, SourceSpec

_STRETCHES = 30


def _plan(num_samples: int, batch_size: int) -> DataPlan:
    return DataPlan(seed=1, batch_size=batch_size, sources=(
        SourceSpec(name="prose", num_samples=num_samples * 7 // 10, digest="a", weight=7),
        SourceSpec(name="code", num_samples=num_samples * 3 // 10, digest="b", weight=3)))


def main() -> None:
    """Print one line of JSON."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rates = {}
    for batch_size in (16, 512, 4096):
        plan, stretch = _plan(100_000_000, batch_size), max(1, 8192 // batch_size)  # as the loader asks for them
        started = time.process_time()
        for number in range(_STRETCHES):
            plan.block_ids(number * stretch, stretch)
        rates[batch_size] = round(_STRETCHES * stretch * batch_size / (time.process_time() - started))
    plan, segments = _plan(100_000_000, 512), Segments().resumed(500_000, skip_batches=300).resumed(900_000, reshuffle=True)
    started = time.process_time()
    plan.block_ids(1_000_000, 8192 // 512, segments)
    seek = time.process_time() - started
    print(json.dumps({"benchmark": "data plan", "unit": "CPU seconds, one thread", "ids_per_second_by_batch": rates,
                      "seek_to_step_1000000_ms": round(seek * 1e3, 2),
                      "memory_growth_mb": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1)}))


if __name__ == "__main__":
    main()
