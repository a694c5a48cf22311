"""Tables: a header with a step column, then one row a logged step. Empty cells are "not recorded"."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from chronicle.metrics.lines import canonical_name
from chronicle.metrics.log import Point

STEP_NAMES = ("step", "global_step", "_step", "iteration", "iter", "train/global_step", "trainer/global_step")
TIME_NAMES = ("t", "time", "wall_time", "_timestamp", "timestamp", "wall time")
LAUNCH_NAMES = ("launch", "event_file", "session", "segment")
VALUE_NAME = "value"  # TensorBoard's own CSV download: `Wall time,Step,Value`


def read_csv(path: Path) -> Iterator[Point]:
    """Yield the points of a CSV or TSV; rows without a whole-number step are passed over.

    A table without a step column counts its rows. `NaN` and `inf` are values, an empty cell is none.
    """
    with open(path, encoding="utf-8", errors="replace", newline="") as table:
        head = table.readline()
        delimiter = max("\t;,", key=head.count)
        names = [name.strip().strip("\ufeff") for name in next(csv.reader([head], delimiter=delimiter), [])]
        yield from _points(names, csv.reader((line.replace("\0", "") for line in table), delimiter=delimiter))


def _points(names: Sequence[str], rows: Iterator[list[str]]) -> Iterator[Point]:
    lowered = [name.lower() for name in names]
    step_at, time_at, launch_at = (_column(lowered, known) for known in (STEP_NAMES, TIME_NAMES, LAUNCH_NAMES))
    taken = {step_at, time_at, launch_at}
    channels = [(at, _channel(name)) for at, name in enumerate(names) if at not in taken and not _is_band(name)]
    row = 0
    while True:
        try:
            cells = next(rows, None)
        except csv.Error:
            continue
        if cells is None:
            return
        step = _number(cells, step_at) if step_at is not None else float(row)
        if step is None or not math.isfinite(step):
            continue
        values = {name: value for at, name in channels if (value := _number(cells, at)) is not None}
        launch = _number(cells, launch_at)
        whole = None if launch is None or not math.isfinite(launch) else int(launch)
        yield Point(row, int(step), _number(cells, time_at), values, whole)
        row += 1


def _channel(name: str) -> str:
    """W&B's download calls a column `run name - train/loss`; TensorBoard's only column is `Value`."""
    tail = name.rsplit(" - ", 1)[-1]
    return "loss" if tail.lower() == VALUE_NAME else canonical_name(tail)


def _is_band(name: str) -> bool:
    return name.endswith(("__MIN", "__MAX"))


def _column(names: Sequence[str], known: Sequence[str]) -> int | None:
    return next((names.index(name) for name in known if name in names), None)


def _number(cells: Sequence[str], at: int | None) -> float | None:
    if at is None or at >= len(cells):
        return None
    try:
        return float(cells[at])
    except ValueError:
        return None
