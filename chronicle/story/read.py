"""Read a run's story from disk: the journal, a few places of each per-step log, and signs of life.

`ends_of` and `points_until` find their place by bisection in logs larger than `WHOLE_BYTES`. Smaller logs are read whole, so
that a log whose steps go back is read correctly.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from chronicle.journal import Journal, read_journal
from chronicle.launch.heartbeat import FRESH_SECONDS, read_heartbeats
from chronicle.metrics import Point
from chronicle.metrics.log import parse_line
from chronicle.paths import RunPaths, list_launch_numbers
from chronicle.story.assemble import Story, assemble
from rollback.disk import open_file, pread

WHOLE_BYTES = 1 << 20
BLOCK_BYTES = 1 << 16
WINDOW = 64  # lines read before a step: evaluation and gradient norm may be logged less often than the loss


def ends_of(path: Path) -> tuple[int, int] | None:
    """First and last logged step; None when there is no readable line."""
    try:
        with _opened(path) as (fd, size):
            first = next(_points(_whole(fd, min(size, BLOCK_BYTES)).split(b"\n")), None)
            last = _last(fd, size)
    except OSError:
        return None
    return None if first is None or last is None else (first.step, last.step)


def points_until(path: Path, step: int, count: int = WINDOW) -> list[Point]:
    """The last `count` points at or before `step`, oldest first."""
    try:
        with _opened(path) as (fd, size):
            if size <= WHOLE_BYTES:
                newest_first = _points(reversed(_whole(fd, size).split(b"\n")))
                return list(islice((point for point in newest_first if point.step <= step), count))[::-1]
            end = _offset_after(fd, size, step)
            start = max(0, end - BLOCK_BYTES)
            lines = _whole(fd, end, start).split(b"\n")
    except OSError:
        return []
    newest_first = _points(reversed(lines[0 if start == 0 else 1 :]))
    return list(islice((point for point in newest_first if point.step <= step), count))[::-1]


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """(descriptor, size) of a log, which may be in an object store."""
    fd = open_file(path)
    try:
        yield fd, os.fstat(fd).st_size
    finally:
        os.close(fd)


def _whole(fd: int, end: int, start: int = 0) -> bytes:
    """The bytes of `[start, end)`; fewer where the file became shorter."""
    parts = []
    while start < end and (part := pread(fd, end - start, start)):
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def _points(lines: Iterable[bytes]) -> Iterator[Point]:
    return (point for line in lines if (point := parse_line(line)) is not None)


def _last(fd: int, size: int) -> Point | None:
    block = BLOCK_BYTES
    while True:
        start = max(0, size - block)
        lines = _whole(fd, size, start).split(b"\n")
        for line in reversed(lines[0 if start == 0 else 1 :]):
            point = parse_line(line)
            if point is not None:
                return point
        if start == 0:
            return None
        block *= 8


def _offset_after(fd: int, size: int, step: int) -> int:
    """Byte offset after the last line whose step is at or before `step`."""
    last = _last(fd, size)
    if last is not None and last.step <= step:
        return size
    low, high = 0, size
    while high - low > BLOCK_BYTES:
        middle = (low + high) // 2
        block = _whole(fd, min(size, middle + BLOCK_BYTES), middle)
        head, _, rest = block.partition(b"\n")
        point = next(_points(rest.split(b"\n")[:-1]), None)
        if point is None or point.step > step:
            high = middle
        else:
            low = middle + len(head) + 1
    end = low
    for line in _whole(fd, min(size, high + BLOCK_BYTES), low).split(b"\n")[:-1]:
        point = parse_line(line)
        if point is not None and point.step > step:
            break
        end += len(line) + 1
    return end


# --- the story ----------------------------------------------------------------------------------------------------------


def read_story(
    paths: RunPaths,
    *,
    journal: Journal | None = None,
    signs_of_life: bool = True,
) -> Story:
    """The whole story of a run; empty for a run without entries.

    Without `signs_of_life` heartbeats are ignored, so that a rendered page does not change while nothing is recorded.
    """
    journal = read_journal(paths) if journal is None else journal

    def until(launch: int, step: int) -> Sequence[Point]:
        return points_until(paths.metrics_path(launch), step)

    alive = _alive(paths, time.time()) if signs_of_life else ()
    return assemble(journal, observed_steps(paths), until, alive)


def observed_steps(paths: RunPaths) -> dict[int, tuple[int, int]]:
    """First and last logged step of every launch that has a per-step log."""
    try:
        numbers = list_launch_numbers(paths)
    except OSError:
        return {}
    return {n: ends for n in numbers if (ends := ends_of(paths.metrics_path(n))) is not None}


def _alive(paths: RunPaths, now: float) -> list[int]:
    return [beat.launch for beat in read_heartbeats(paths.heartbeats_dir) if beat.age(now) < FRESH_SECONDS]


# --- time lost by each rollback -----------------------------------------------------------------------------------------


def lost_seconds(story: Story, paths: RunPaths) -> dict[str, float]:
    """Rollback entry id -> seconds between its target step and the last step before it, where both times were logged."""
    lost: dict[str, float] = {}
    for mark in story.lineage.rollbacks:
        end, begin = _time(paths, mark.from_launch, mark.from_step), _time(paths, mark.to_launch, mark.to_step)
        if end is not None and begin is not None and end >= begin:
            lost[mark.entry_id] = end - begin
    return lost


def _time(paths: RunPaths, launch: int | None, step: int) -> float | None:
    points = [] if launch is None else points_until(paths.metrics_path(launch), step, 1)
    return points[-1].time if points else None
