"""Logs of named fields: CSV and TSV tables, JSON lines, W&B history, Trainer's `trainer_state.json`.

A table has a header with a step column and one row per logged step; an empty cell means "not recorded". JSON records are
flattened. W&B's `_step` counts log calls: where a record names the trainer's own step, that one counts. Our own
`metrics.jsonl` is read in `log.py`.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from chronicle.metrics.lines import log_lines
from chronicle.metrics.log import NON_FINITE, Point
from rollback.channels import LAUNCH_NAMES, STEP_NAMES, TIME_NAMES, canonical_name

VALUE_NAME = "value"  # TensorBoard's own CSV download: `Wall time,Step,Value`
HEAD_LINES = 50  # blank lines and comments that may precede the header
LOOK_ROWS = 512  # rows read ahead to learn what "nan" means in a column
GAPS, GAP_SHARE, LONGER = 3, 0.3, 4  # least gaps and least share of NaN in a column that has gaps; times the usual gap


class Table:
    """The columns of one table: step, time, launch, channels. `parse` makes a point of a row's cells."""

    def __init__(self, head: str) -> None:
        self.delimiter = max("\t;,", key=head.count)
        names = [name.strip().strip('\ufeff"#').strip() for name in next(csv.reader([head], delimiter=self.delimiter), [])]
        lowered = [name.lower() for name in names]
        self._step_at, self._time_at, self._launch_at = (
            _column(lowered, known) for known in (STEP_NAMES, TIME_NAMES, LAUNCH_NAMES)
        )
        taken = {self._step_at, self._time_at, self._launch_at}
        self.channels = [(at, _channel(name)) for at, name in enumerate(names) if at not in taken and not _is_band(name)]

    def parse(self, cells: Sequence[str], row: int) -> Point | None:
        """Return the point of one row; None where its step is no number."""
        step = row if self._step_at is None else self._step(cells, self._step_at)
        if step is None:
            return None
        try:
            values = {name: float(cells[at]) for at, name in self.channels}
        except (ValueError, IndexError):
            values = {name: value for at, name in self.channels if (value := self._number(cells, at)) is not None}
        launch = self._number(cells, self._launch_at)
        whole = None if launch is None or not math.isfinite(launch) else int(launch)
        return Point(row, step, self._number(cells, self._time_at), values, whole)

    def _step(self, cells: Sequence[str], at: int) -> int | None:
        try:
            return int(cells[at])
        except (ValueError, IndexError):
            step = self._number(cells, at)
        return None if step is None or not math.isfinite(step) else int(step)

    def _number(self, cells: Sequence[str], at: int | None) -> float | None:
        """Return a cell as a number: `0.5`, `1e400`, `1,000`; with another delimiter than a comma also `0,5`."""
        if at is None or at >= len(cells):
            return None
        cell = cells[at]
        try:
            return float(cell)
        except ValueError:
            if "," not in cell:
                return None
        try:
            return float(cell.replace(",", "" if self.delimiter == "," else "."))
        except ValueError:
            return None


class TableLines:
    """Parse a growing table line by line; the header comes first, and again where the file was rewritten."""

    def __init__(self) -> None:
        self._table: Table | None = None

    def __call__(self, line: bytes, row: int) -> Point | None:
        text = line.decode("utf-8", errors="replace").replace("\0", "").strip()
        if not text or (self._table is not None and text.startswith("#")):
            return None
        if is_header(text):
            self._table = Table(text)
            return None
        if self._table is None:
            return None
        try:
            cells = next(csv.reader([text], delimiter=self._table.delimiter), [])
        except csv.Error:
            return None
        return self._table.parse(cells, row)


def is_header(line: str) -> bool:
    """Whether a line is a header: a line of names, a step or a loss among them."""
    names = {name.strip().strip('"\ufeff# \r').lower() for name in line.replace(";", ",").replace("\t", ",").split(",")}
    return bool(names & {*STEP_NAMES, "loss"}) and (len(names) > 1 or names == {"loss"})


def find_header(lines: Iterable[str]) -> str | None:
    """Return the header, below blank lines and comments; None where something else comes first."""
    for line in islice(lines, HEAD_LINES):
        if is_header(line):
            return line
        if line.strip("\ufeff \t\r\n") and not line.lstrip("\ufeff").startswith("#"):
            return None
    return None


def read_csv(path: Path) -> Iterator[Point]:
    """Yield the points of a CSV or TSV. `row` is the row of the file: rows without a step are counted, too.

    In a table without a step column the row is the step. `NaN` and `inf` are values, an empty cell is not. In a column
    where NaN comes and goes from the start, as in files that record every tenth step, NaN means "not recorded".
    """
    lines = log_lines(path, newline="")
    head = find_header(lines)
    if head is not None:
        table = Table(head)
        yield from _drop_unrecorded(_points(table, csv.reader(_rows(lines), delimiter=table.delimiter)))


def _rows(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if line[:1] != "#":
            yield line.replace("\0", "") if "\0" in line else line


def _points(table: Table, rows: Iterator[list[str]]) -> Iterator[Point]:
    row = 0
    while True:
        try:
            cells = next(rows, None)
        except csv.Error:
            row += 1
            continue
        if cells is None:
            return
        if not cells or not any(cells):
            continue
        point = table.parse(cells, row)
        row += 1
        if point is not None:
            yield point


def _drop_unrecorded(points: Iterator[Point]) -> Iterator[Point]:
    """Remove each NaN that means "not recorded"; a run of NaN four times as long as usual is kept."""
    first = list(islice(points, LOOK_ROWS))
    gaps = {name: gap for name in _nan_channels(first) if (gap := _usual_gap(first, name))}
    if not gaps:
        yield from chain(first, points)
        return
    lasting = dict.fromkeys(gaps, 0)
    for point in chain(first, points):
        kept = dict(point.values)
        for name, (usual, until) in gaps.items():
            value = kept.get(name)
            if value is None or value == value:
                lasting[name] = 0
                continue
            lasting[name] += 1
            if lasting[name] <= LONGER * usual and point.row <= until:
                del kept[name]
        yield point._replace(values=kept)


def _nan_channels(points: Sequence[Point]) -> set[str]:
    return {name for point in points for name, value in point.values.items() if value != value}


def _usual_gap(points: Sequence[Point], name: str) -> tuple[int, float] | None:
    """Return (longest NaN gap, last row it applies to; inf when NaNs are intermittent); None where NaN is a value."""
    series = [(point.row, point.values[name]) for point in points if name in point.values]
    runs, run, share = [], 0, 0
    for _, value in series:
        if value != value:
            run, share = run + 1, share + 1
        elif run:
            runs.append(run)
            run = 0
    if len(runs) >= GAPS and share >= GAP_SHARE * len(series):
        return max(runs), math.inf
    first = next((row for row, value in series if value == value), None)
    if first is not None and first > series[0][0]:
        return runs[0], first
    return None


def _channel(name: str) -> str:
    """Return the channel of a column: W&B's download has `run name - train/loss`, TensorBoard's has `Value`."""
    tail = name.rsplit(" - ", 1)[-1]
    return "loss" if tail.lower() == VALUE_NAME else canonical_name(tail)


def _is_band(name: str) -> bool:
    return name.endswith(("__MIN", "__MAX"))


def _column(names: Sequence[str], known: Sequence[str]) -> int | None:
    return next((names.index(name) for name in known if name in names), None)


# --- JSON records

SUMMARY = "train_runtime"  # Trainer's last record: its train_loss is the mean of the run, not a point of it


def read_json_lines(path: Path) -> Iterator[Point]:
    """Yield the points of a JSONL file; lines that are no object or have no step are skipped."""
    yield from _points_of_records(_records(log_lines(path)))


def parse_json_line(line: str | bytes, row: int = 0) -> Point | None:
    """Return the point of one line; None where it is no object with a step."""
    text = line.decode("utf-8", errors="replace") if isinstance(line, bytes) else line
    point = next(_points_of_records(_records([text])), None)
    return None if point is None else point._replace(row=row)


def read_trainer_state(path: Path) -> Iterator[Point]:
    """Yield the points of `log_history` or of a list of records; none where the file has neither."""
    try:
        state = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return
    history = state.get("log_history") if isinstance(state, dict) else state
    if isinstance(history, list):
        yield from _points_of_records(record for record in history if isinstance(record, dict) and SUMMARY not in record)


def _records(lines: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def _points_of_records(records: Iterable[Mapping[str, Any]]) -> Iterator[Point]:
    row = 0
    for record in records:
        flat = dict(_flatten(record))
        step = next((flat[name] for name in STEP_NAMES if name in flat), None)
        if step is None or not math.isfinite(step) or step != int(step):
            continue
        time = next((flat[name] for name in TIME_NAMES if name in flat), None)
        launch = next((int(flat[name]) for name in LAUNCH_NAMES if name in flat and math.isfinite(flat[name])), None)
        skip = {*STEP_NAMES, *TIME_NAMES, *LAUNCH_NAMES, "epoch"}
        values = {canonical_name(name): value for name, value in flat.items() if name not in skip}
        if values:
            yield Point(row, int(step), time, values, launch)
            row += 1


def _flatten(record: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        full = f"{prefix}{name}"
        if isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            yield full, float(value) if isinstance(value, float) else value
        elif isinstance(value, str) and value in NON_FINITE:
            yield full, NON_FINITE[value]
        elif isinstance(value, dict) and depth < 3:
            yield from _flatten(value, f"{full}/", depth + 1)
