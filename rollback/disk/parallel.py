"""Many files read at once: a sharded checkpoint has one per rank, and reading is work for the processor.

Processes, not threads: the pickle machine is Python. A handful of files is read here and now, because starting
processes costs more than it saves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

ENOUGH_FILES = 48


def map_files(read: Callable[[T], R], jobs: Sequence[T]) -> list[R]:
    """`[read(job) for job in jobs]`, on all cores when there are many; the first error is raised, none is lost."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    if len(jobs) < ENOUGH_FILES or cores < 2:
        return [read(job) for job in jobs]
    from concurrent.futures import ProcessPoolExecutor

    chunk = max(1, len(jobs) // (cores * 4))
    with ProcessPoolExecutor(max_workers=min(cores, 16)) as executor:
        return list(executor.map(read, jobs, chunksize=chunk))
