"""Tables that hold several runs: a panel's export (`alpha - train/loss`, `beta - train/loss`), and a table with a run column.

W&B's panels name a column `run - metric`, with bands `…__MIN` and `…__MAX`. Other exports have one row for each run and step,
some one for each metric (`run,tag,step,value`): a long table, which may also hold one run only. Where a long table is sorted
by tag, its steps begin anew with each tag; that is no new launch. Any other table of one run is read by `records.read_csv`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from chronicle.metrics.log import Point
from chronicle.metrics.numbers import number_in
from chronicle.metrics.records import column_of, find_header, join_steps
from chronicle.metrics.text import log_lines, read_head
from rollback.channels import STEP_NAMES, TIME_NAMES

BETWEEN = " - "
BANDS = ("__MIN", "__MAX")
RUN_NAMES = ("run", "run_id", "run_name", "run name", "run id", "run_uuid")
TAG_NAMES = ("tag", "metric", "metric_name", "key", "name")
VALUE_NAMES = ("value", "metric_value")


def read_runs_of_table(path: Path) -> Mapping[str, Sequence[Point]] | None:
    """Points by run, in the order of the columns or rows; None where the file is no table, or one of one run that is not long.

    A long table without a run column is called as its file.
    """
    text = read_head(path).decode("utf-8-sig", errors="replace")
    head = find_header(text.splitlines())
    if head is None:
        return None
    delimiter = max("\t;,", key=head.count)
    names = next(csv.reader([head], delimiter=delimiter), [])
    lowered = [name.strip().strip("\ufeff").lower() for name in names]
    step_at, time_at, run_at = (column_of(lowered, known) for known in (STEP_NAMES, TIME_NAMES, RUN_NAMES))
    if step_at is None:
        return None
    rows = csv.reader(log_lines(path, newline=""), delimiter=delimiter)
    body = (row for row in rows if row != names and any(row))
    tags = [column_of(lowered, known) for known in (TAG_NAMES, VALUE_NAMES)]
    if None not in tags:
        found: dict[str, list[Point]] = {}
        for run, point in _by_row(body, run_at, step_at, time_at, (), tags):
            found.setdefault(run or path.stem, []).append(point)
        return {run: _numbered(_beside(points)) for run, points in found.items()} or None
    if run_at is not None:
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
    return {run: _numbered(points) for run, points in runs.items()} if len(runs) > 1 else None


def _numbered(points: Sequence[Point]) -> list[Point]:
    return [point._replace(row=row) for row, point in enumerate(join_steps(points))]


def _beside(points: list[Point]) -> list[Point]:
    """The points of a long table that is sorted by tag, with the tags beside one another; of any other table as they are.

    Where the steps of a tag go back, a later pass begins.
    """
    tags = [next(iter(point.values)) for point in points]
    blocks = [tag for at, tag in enumerate(tags) if at == 0 or tags[at - 1] != tag]
    if len(blocks) != len(set(blocks)) or len(blocks) < 2:
        return points
    passes: list[int] = []
    for at, point in enumerate(points):
        again = at > 0 and tags[at - 1] == tags[at]
        passes.append(passes[-1] + (point.step < points[at - 1].step) if again else 0)
    order = sorted(range(len(points)), key=lambda at: (passes[at], points[at].step))
    return [points[at] for at in order]


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
    rows: Iterator[list[str]], run_at: int | None, step_at: int, time_at: int | None,
    named: Sequence[tuple[int, str]], tags: Sequence[int | None],
) -> _Points:  # fmt: skip
    tag_at, value_at = tags
    for row in rows:
        step = _number(row, step_at)
        run = "" if run_at is None else row[run_at].strip() if run_at < len(row) else ""
        if step is None or step != int(step) or (run_at is not None and not run):
            continue
        if tag_at is not None and value_at is not None and max(tag_at, value_at) < len(row):
            pairs = chain([(row[tag_at].strip(), _number(row, value_at))])
        else:
            pairs = chain((name.strip(), _number(row, at)) for at, name in named)
        found = {name: value for name, value in pairs if value is not None}
        if found:
            yield run, Point(0, int(step), _number(row, time_at), found)


def _number(row: Sequence[str], at: int | None) -> float | None:
    return None if at is None or at >= len(row) else number_in(row[at].strip())
