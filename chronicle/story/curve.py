"""The curve of a run: each logged point along the lineage, or of every launch, with whether it is kept."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from chronicle.journal import Lineage
from chronicle.metrics import read_metrics
from chronicle.paths import RunPaths


class CurveRow(NamedTuple):
    """One logged point. `kept`: the present weights descend from it."""

    step: int
    launch: int
    time: float | None
    kept: bool
    values: Mapping[str, float]


def canonical_rows(paths: RunPaths, lineage: Lineage, *, abandoned: bool = False) -> Iterator[CurveRow]:
    """Yield rows in step order along the lineage; with `abandoned`, all rows of every launch in its own order."""
    if abandoned:
        for span in lineage.launches:
            limit = span.last_step if span.abandoned_after is None else span.abandoned_after
            for row in _rows(paths, span.number):
                yield row._replace(kept=limit is None or row.step <= limit)
        return
    for interval in lineage.kept:
        for row in _rows(paths, interval.launch):
            if interval.first <= row.step <= interval.last:
                yield row


def channel_names(rows: Iterator[CurveRow]) -> list[str]:
    """Return every channel name once, in order of first appearance."""
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row.values))
    return list(names)


def _rows(paths: RunPaths, launch: int) -> Iterator[CurveRow]:
    try:
        for point in read_metrics(paths.metrics_path(launch)):
            yield CurveRow(point.step, launch, point.time, True, point.values)
    except FileNotFoundError:
        return  # a launch that ended before its first step
