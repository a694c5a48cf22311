"""The points a launch's weights descend from: the lineage's kept steps, out of the launches' own logs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from chronicle.journal.entries import Entry
from chronicle.journal.lineage import Interval, compute_lineage
from chronicle.metrics.log import Point, read_metrics
from chronicle.paths import RunPaths
from chronicle.resume.checks.log_tripwires import NUM_BEFORE, Row, logged_row

REACH_STEPS = 20_000  # the longest memory of the detector, with room


def kept_before(paths: RunPaths, entries: Sequence[Entry], launch: int) -> tuple[Interval, ...]:
    """The kept intervals of the launches before this one."""
    earlier = [entry for entry in entries if entry.launch is None or entry.launch < launch]
    return compute_lineage(earlier, _observed(paths, launch)).kept


def read_past(
    paths: RunPaths, kept: Sequence[Interval], first_step: int, *, after: int = -1
) -> Iterator[tuple[int, Point]]:
    """Yield (launch, point) of the kept steps above `after` and below `first_step`; missing logs are left out."""
    for interval in kept:
        first, last = max(interval.first, after + 1, first_step - REACH_STEPS), min(interval.last, first_step - 1)
        if last < first:
            continue
        try:
            points = list(read_metrics(paths.metrics_path(interval.launch)))
        except OSError:
            continue
        for point in points:
            if first <= point.step <= last:
                yield interval.launch, point


def last_rows(paths: RunPaths, kept: Sequence[Interval], until: int) -> list[Row]:
    """LR and loss of the last kept steps up to `until`; where all are later (the counter began anew), the last of all."""
    if not any(interval.first <= until for interval in kept):
        until = max((interval.last for interval in kept), default=0)
    rows: list[Row] = []
    for interval in reversed(kept):
        if len(rows) >= NUM_BEFORE:
            break
        try:
            points = read_metrics(paths.metrics_path(interval.launch))
            found = [logged_row(p.step, p.values) for p in points if interval.first <= p.step <= min(interval.last, until)]
        except OSError:
            continue
        rows = [row for row in found if row is not None][-NUM_BEFORE:] + rows
    return rows[-NUM_BEFORE:]


def _observed(paths: RunPaths, launch: int) -> dict[int, tuple[int, int]]:
    """First and last logged step of every earlier launch."""
    seen: dict[int, tuple[int, int]] = {}
    for number in range(1, launch):
        try:
            steps = [point.step for point in read_metrics(paths.metrics_path(number))]
        except OSError:
            continue
        if steps:
            seen[number] = (min(steps), max(steps))
    return seen
