"""Tables that hold several runs: a panel's export (`alpha - train/loss`, `beta - train/loss`), and a table with a run column.

W&B's panels name a column `run - metric`, with bands `…__MIN` and `…__MAX`. Other exports have one row for each run and step,
some also one for each metric (`run,tag,step,value`). A table of one run is read by `records.read_csv`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from chronicle.metrics.lines import log_lines, number_in, read_head
from chronicle.metrics.log import Point
from chronicle.metrics.records import find_header, join_steps
from rollback.channels import STEP_NAMES, TIME_NAMES

BETWEEN = " - "
BANDS = ("__MIN", "__MAX")
RUN_NAMES = ("run", "run_id", "run_name", "run name", "run id", "run_uuid")
TAG_NAMES = ("tag", "metric", "metric_name", "key", "name")
VALUE_NAMES = ("value", "metric_value")


def read_runs_of_table(path: Path) -> Mapping[str, Sequence[Point]] | None:
    """Points by run, in the order of the columns or rows; None where the file is no table, or names no more than one run."""
    text = read_head(path).decode("utf-8-sig", errors="replace")
    head = find_header(text.splitlines())
    if head is None:
        return None
    delimiter = max("\t;,", key=head.count)
    names = next(csv.reader([head], delimiter=delimiter), [])
    lowered = [name.strip().strip("\ufeff").lower() for name in names]
    step_at, time_at = (
        next((lowered.index(one) for one in known if one in lowered), None) for known in (STEP_NAMES, TIME_NAMES)
    )
    run_at = next((lowered.index(one) for one in RUN_NAMES if one in lowered), None)
    if step_at is None:
        return None
    rows = csv.reader(log_lines(path, newline=""), delimiter=delimiter)
    body = (row for row in rows if row != names and any(row))
    if run_at is not None:
        tags = [
            next((lowered.index(one) for one in known if one in lowered), None) for known in (TAG_NAMES, VALUE_NAMES)
        ]
        named = [(at, name) for at, name in enumerate(names) if at not in (run_at, step_at, time_at, *tags)]
        return _several(_by_row(body, run_at, step_at, time_at, named, tags))
    parts = [(at, name.rpartition(BETWEEN)) for at, name in enumerate(names) if not name.endswith(BANDS)]
    panels = [(at, run, tag) for at, (run, between, tag) in parts if between]
    if len({run for _, run, _ in panels}) < 2:
        return None
    return _several(_by_column(body, step_at, time_at, panels))


_Points = Iterator[tuple[str, Point]]


def _several(found: _Points) -> Mapping[str, Sequence[Point]] | None:
    runs: dict[str, list[Point]] = {}
    for run, point in found:
        runs.setdefault(run, []).append(point)
    joined = {
        run: [point._replace(row=row) for row, point in enumerate(join_steps(points))] for run, points in runs.items()
    }
    return joined if len(joined) > 1 else None


def _by_column(
    rows: Iterator[list[str]], step_at: int, time_at: int | None, panels: Sequence[tuple[int, str, str]]
) -> _Points:
    for row in rows:
        step = _number(row, step_at)
        if step is None or step != int(step):
            continue
        values: dict[str, dict[str, float]] = {}
        for at, run, name in panels:
            if (value := _number(row, at)) is not None:
                values.setdefault(run, {})[name] = value
        for run, found in values.items():
            yield run, Point(0, int(step), _number(row, time_at), found)


def _by_row(
    rows: Iterator[list[str]], run_at: int, step_at: int, time_at: int | None,
    named: Sequence[tuple[int, str]], tags: Sequence[int | None],
) -> _Points:  # fmt: skip
    tag_at, value_at = tags
    for row in rows:
        step = _number(row, step_at)
        if step is None or step != int(step) or run_at >= len(row) or not row[run_at].strip():
            continue
        if tag_at is not None and value_at is not None and max(tag_at, value_at) < len(row):
            pairs = chain([(row[tag_at].strip(), _number(row, value_at))])
        else:
            pairs = chain((name.strip(), _number(row, at)) for at, name in named)
        found = {name: value for name, value in pairs if value is not None}
        if found:
            yield row[run_at].strip(), Point(0, int(step), _number(row, time_at), found)


def _number(row: Sequence[str], at: int | None) -> float | None:
    return None if at is None or at >= len(row) else number_in(row[at].strip())
