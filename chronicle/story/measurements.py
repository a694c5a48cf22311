"""Single places in a per-step log, found without reading the whole of it: its two ends, and what was measured at a step.

Steps of one launch grow from line to line; a small file is read whole all the same, so that a log which jumps back is
told right. Above `WHOLE_BYTES` the place is found by halving.
"""

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from chronicle.metrics import Point
from chronicle.metrics.log import parse_line

__all__ = ["ends_of", "points_until"]

WHOLE_BYTES = 1 << 20
BLOCK_BYTES = 1 << 16
WINDOW = 64  # lines looked at before a step: evaluation and gradient norm may be logged less often than the loss


def ends_of(path: Path) -> tuple[int, int] | None:
    """First and last logged step; None when there is no readable line."""
    try:
        with path.open("rb") as file:
            first = next(_points(file.read(BLOCK_BYTES).split(b"\n")), None)
            size = file.seek(0, os.SEEK_END)
            last = _last(file.fileno(), size)
    except OSError:
        return None
    return None if first is None or last is None else (first.step, last.step)


def points_until(path: Path, step: int, count: int = WINDOW) -> list[Point]:
    """The last `count` points at or before `step`, oldest first."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size <= WHOLE_BYTES:
                file.seek(0)
                points = (point for point in _points(file) if point.step <= step)
                return list(deque(points, maxlen=count))
            end = _offset_after(file.fileno(), size, step)
            start = max(0, end - BLOCK_BYTES)
            lines = os.pread(file.fileno(), end - start, start).split(b"\n")
    except OSError:
        return []
    return [point for point in _points(lines[0 if start == 0 else 1 :]) if point.step <= step][-count:]


def _points(lines: Iterator[bytes] | list[bytes]) -> Iterator[Point]:
    return (point for line in lines if (point := parse_line(line)) is not None)


def _last(fd: int, size: int) -> Point | None:
    block = BLOCK_BYTES
    while True:
        start = max(0, size - block)
        lines = os.pread(fd, size - start, start).split(b"\n")
        for line in reversed(lines[0 if start == 0 else 1 :]):
            point = parse_line(line)
            if point is not None:
                return point
        if start == 0:
            return None
        block *= 8


def _offset_after(fd: int, size: int, step: int) -> int:
    """Byte offset behind the last line whose step is at or before `step`."""
    low, high = 0, size
    while high - low > BLOCK_BYTES:
        middle = (low + high) // 2
        block = os.pread(fd, BLOCK_BYTES, middle)
        head, _, rest = block.partition(b"\n")
        point = next(_points(rest.split(b"\n")[:-1]), None)
        if point is None or point.step > step:
            high = middle
        else:
            low = middle + len(head) + 1
    end = low
    for line in os.pread(fd, min(size, high + BLOCK_BYTES) - low, low).split(b"\n")[:-1]:
        point = parse_line(line)
        if point is not None and point.step > step:
            break
        end += len(line) + 1
    return end
