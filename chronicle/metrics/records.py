"""Logs of named fields: CSV and TSV tables, JSON lines, W&B history, Trainer's `trainer_state.json`.

A table has a header with a step column and one row per logged step; an empty cell means "not recorded". JSON records are
flattened. W&B's `_step` counts log calls: where a record names the trainer's own step, that one counts. Our own
`metrics.jsonl` is read in `log.py`.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from chronicle.metrics.counters import EpochSteps
from chronicle.metrics.log import Point
from chronicle.metrics.numbers import non_finite, number_in
from chronicle.metrics.text import ANSI, PREFIX, log_lines
from rollback.channels import EPOCH_NAMES, LAUNCH_NAMES, STEP_NAMES, TIME_NAMES, Role, role_of

VALUE_NAME = "value"  # TensorBoard's own CSV download: `Wall time,Step,Value`
HEAD_LINES = 50  # blank lines and comments that may precede the header
LOOK_ROWS = 512  # rows read ahead to learn what "nan" means in a column
GAPS, GAP_SHARE, LONGER = 3, 0.3, 4  # least gaps and least share of NaN in a column that has gaps; times the usual gap


class Table:
    """The columns of one table: step, time, launch, channels. `parse` makes a point of a row's cells.

    Each column keeps its own name. `step` names the step column where the table of names does not know it.
    """

    def __init__(self, head: str, step: str | None = None) -> None:
        head = ANSI.sub("", head)
        self.delimiter = max("\t;,", key=head.count)
        names = [name.strip().strip('\ufeff"#').strip() for name in next(csv.reader([head], delimiter=self.delimiter), [])]
        lowered = [name.lower() for name in names]
        self._prefix = PREFIX.match(names[0]) if names else None  # of a program that prints a table behind time and host
        if self._prefix is not None:
            names[0] = names[0][self._prefix.end() :].strip()
            lowered[0] = names[0].lower()
        self._step_at, self._time_at, self._launch_at = (
            column_of(lowered, known)
            for known in (STEP_NAMES if step is None else (step.lower(),), TIME_NAMES, LAUNCH_NAMES)
        )
        epoch_at = column_of(lowered, EPOCH_NAMES)
        self._epoch_at = None if epoch_at == self._step_at else epoch_at
        self._epochs = EpochSteps()
        taken = {self._step_at, self._time_at, self._launch_at, self._epoch_at}
        channels = [(at, _channel(name)) for at, name in enumerate(names) if at not in taken and not _is_band(name)]
        twice = {name for _, name in channels if sum(name == other for _, other in channels) > 1}
        self.channels = [(at, f"{names[at]} ({at})" if name in twice else name) for at, name in channels]

    def parse(self, cells: Sequence[str], row: int) -> Point | None:
        """Return the point of one row; None where its step is no number."""
        if self._prefix is not None and cells:
            cells = [PREFIX.sub("", cells[0]), *cells[1:]]
        step = row if self._step_at is None else self._step(cells, self._step_at)
        if step is None:
            return None
        epoch = None if self._epoch_at is None else self._number(cells, self._epoch_at)
        if epoch is not None:
            step = self._epochs.step(epoch, step)
        try:
            values = {name: float(cells[at]) for at, name in self.channels}
        except (ValueError, IndexError):
            values = {name: value for at, name in self.channels if (value := self._number(cells, at)) is not None}
        launch = self._number(cells, self._launch_at)
        whole = None if launch is None or not math.isfinite(launch) else int(launch)
        return Point(row, step, self._number(cells, self._time_at), values, whole, self._step_at is None)

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
                return non_finite(cell)
        try:
            return float(cell.replace(",", "" if self.delimiter == "," else "."))
        except ValueError:
            return None


class TableLines:
    """Parse a growing table line by line; the header comes first, and again where the file was rewritten."""

    def __init__(self, step: str | None = None, named: frozenset[str] = frozenset()) -> None:
        self._table: Table | None = None
        self._step, self._names = step, named

    def __call__(self, line: bytes, row: int) -> Point | None:
        text = ANSI.sub("", line.decode("utf-8", errors="replace")).replace("\0", "").strip()
        if not text or (self._table is not None and text.startswith("#")):
            return None
        if is_header(text, self._names):
            self._table = Table(text, self._step)
            return None
        if self._table is None:
            return None
        try:
            cells = next(csv.reader([text], delimiter=self._table.delimiter), [])
        except csv.Error:
            return None
        point = self._table.parse(cells, row)
        whole = len(cells) > max((at for at, _ in self._table.channels), default=0)
        return point if point is None or point.values or whole else None


MEASURED = re.compile(r"\s[-+]?\d+(?:\.\d+|e[-+]\d+)")  # `loss 0.53`: a cell of a line, and no name


def is_header(line: str, named: frozenset[str] = frozenset()) -> bool:
    """Whether a line is a header: a line of names and no number, a step or a channel of a known role among them.

    `named` are names that a person gave: a header that holds one is known by it.
    """
    plain = PREFIX.sub("", ANSI.sub("", line))
    names = {name.strip().strip('"\ufeff# \r').lower() for name in plain.replace(";", ",").replace("\t", ",").split(",")}
    if len(names) < 2:
        return bool(names) and role_of(next(iter(names))) is Role.LOSS and next(iter(names)).isidentifier()
    if any(MEASURED.search(name) for name in names):
        return False
    if any(any(mark in name for mark in ":={}|") or number_in(name) is not None for name in names):
        return bool(names & {*STEP_NAMES, "loss"}) and not any("{" in name or "=" in name or ": " in name for name in names)
    lowered = {name.lower() for name in named}
    return any(name in STEP_NAMES or name in lowered or role_of(name) is not Role.IGNORED for name in names)


def find_header(lines: Iterable[str], named: frozenset[str] = frozenset()) -> str | None:
    """Return the header, below blank lines and comments; None where something else comes first."""
    for line in islice(lines, HEAD_LINES):
        if is_header(line, named):
            return line
        if line.strip("\ufeff \t\r\n") and not line.lstrip("\ufeff").startswith("#"):
            return None
    return None


def read_csv(path: Path, step: str | None = None, named: frozenset[str] = frozenset()) -> Iterator[Point]:
    """Yield the points of a CSV or TSV. `row` is the row of the file: rows without a step are counted, too.

    In a table without a step column the row is the step. `NaN` and `inf` are values, an empty cell is not. In a column
    where NaN comes and goes from the start, as in files that record every tenth step, NaN means "not recorded".
    """
    lines = log_lines(path, newline="")
    head = find_header(lines, named)
    if head is not None:
        table = Table(head, step)
        rows = csv.reader(_rows(lines), delimiter=table.delimiter)
        yield from join_steps(_drop_unrecorded(_points(table, rows)))


def _rows(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if line[:1] == "#":
            continue
        if line[-1:] not in "\r\n" and len(line) > 1:  # the file is cut here: its last number may go on
            line = line[: max(line.rfind(mark) for mark in ",;\t") + 1]
        if "\x1b" in line:
            line = ANSI.sub("", line)
        yield line.replace("\0", "") if "\0" in line else line


def join_steps(points: Iterable[Point]) -> Iterator[Point]:
    """Make one point of neighbours with the same step that measured different channels."""
    pending: Point | None = None
    for point in points:
        if (
            pending is not None and pending.step == point.step and pending.launch == point.launch
            and not pending.values.keys() & point.values.keys()
        ):  # fmt: skip
            pending = pending._replace(values={**pending.values, **point.values})
            continue
        if pending is not None:
            yield pending
        pending = point
    if pending is not None:
        yield pending


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
    return "loss" if tail.lower() == VALUE_NAME else tail


def _is_band(name: str) -> bool:
    return name.endswith(("__MIN", "__MAX"))


def column_of(names: Sequence[str], known: Sequence[str]) -> int | None:
    """The place of the first known name among the names of a head."""
    return next((names.index(name) for name in known if name in names), None)


# --- JSON records

SHARE_OF = re.compile(r"^(\d+)/\d+$")  # a step of all
SUMMARY_WORDS = {"mean", "std", "num", "count", "min", "max", "median", "sum"}
SUMMARY = "train_runtime"  # Trainer's last record: its train_loss is the mean of the run, not a point of it


def read_json_lines(path: Path, step: str | None = None) -> Iterator[Point]:
    """Yield the points of a JSONL file; lines that are no object, or have no step where others have one, are skipped."""
    yield from join_steps(_points_of_records(_records(log_lines(path)), step))


class JsonLines:
    """Parse JSON lines one by one; None where a line is no object with a step."""

    def __init__(self, step: str | None = None) -> None:
        self._counted = Counted(step)

    def __call__(self, line: str | bytes, row: int = 0) -> Point | None:
        text = line.decode("utf-8", errors="replace") if isinstance(line, bytes) else line
        record = next(_records([text]), None)
        point = None if record is None else self._counted.point(record)
        return None if point is None else point._replace(row=row)


class Counted:
    """Make points of the records of one log. Where the first record with a loss has no step, records are counted."""

    def __init__(self, step: str | None = None) -> None:
        self._epochs, self._step = EpochSteps(), step
        self._next: int | None = None  # the count, where records have no step of their own
        self._begun = step is not None
        self._measured = False  # whether a loss was a number

    def point(self, record: Mapping[str, Any]) -> Point | None:
        """Return the point of one record; None where it has no step or no value."""
        found = point_of_record(record, self._epochs, step=self._step, counted=self._next)
        if found is None and not self._begun and SUMMARY not in record:
            counted = point_of_record(record, self._epochs, counted=0)
            if counted is not None and _has_loss(counted):
                found, self._next = counted, 0
        if found is None:
            return None
        self._measured = self._measured or _has_loss(found)
        if not found.values and not self._measured:
            return None
        self._begun = True
        self._next = None if self._next is None else self._next + 1
        return found


def _has_loss(point: Point) -> bool:
    return any(role_of(name) is Role.LOSS for name in point.values)


def read_document(path: Path, step: str | None = None) -> Iterator[Point]:
    """Yield the points of one JSON document; none where its form is unknown.

    Known: Trainer's `log_history`, a list of records, columns of equal length (Keras' history), and Megatron's golden
    values: {name: {"start_step": 1, "step_interval": 5, "values": [...] or {"1": ...}}}.
    """
    try:
        state = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return
    history = state.get("log_history") if isinstance(state, dict) and "log_history" in state else state
    columns = isinstance(history, dict)
    if isinstance(history, dict):
        history = _records_of_columns(history)
    if isinstance(history, list):
        records = (record for record in history if isinstance(record, dict) and SUMMARY not in record)
        points = _points_of_records(records, step)
        if columns and not _names_steps(state):
            points = (point._replace(counted=True) for point in points)
        yield from join_steps(_drop_unrecorded(points) if columns else points)


def _names_steps(columns: Mapping[str, Any]) -> bool:
    """Whether columns say of which steps they are: a column of steps, a first step or a step for each value."""
    named = any(isinstance(columns.get(name), list) for name in STEP_NAMES)
    return named or any(isinstance(column, dict) for column in columns.values())


def _records_of_columns(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Make records of columns: one list each, or golden values with their steps."""
    rows: dict[int, dict[str, Any]] = {}
    given = next((columns[name] for name in STEP_NAMES if isinstance(columns.get(name), list)), None)
    for name, column in columns.items():
        values = column.get("values") if isinstance(column, dict) else column
        first = int(number_in(column.get("start_step")) or 0) if isinstance(column, dict) else 0
        stride = int(number_in(column.get("step_interval")) or 1) if isinstance(column, dict) else 1
        if isinstance(values, list):
            counted = range(first, first + stride * len(values), stride)
            steps = given if given is not None and len(given) == len(values) else counted
            pairs = list(zip(steps, values, strict=True))
        elif isinstance(values, dict):
            pairs = list(values.items())
        else:
            continue
        for at, value in pairs:
            step, number = number_in(at), number_in(value)
            if step is not None and number is not None and math.isfinite(step):
                rows.setdefault(int(step), {"step": int(step)})[name] = number
    return [rows[step] for step in sorted(rows)]


def _records(lines: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        text = line if line[:1] == "{" else ANSI.sub("", line)
        start = text.find("{")  # behind the time and the host of a collector
        try:
            record = json.loads(text if start <= 0 else text[start:])
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def _points_of_records(records: Iterable[Mapping[str, Any]], step: str | None = None) -> Iterator[Point]:
    row, counted = 0, Counted(step)
    for record in records:
        point = counted.point(record)
        if point is not None:
            yield point._replace(row=row)
            row += 1


def point_of_record(
    record: Mapping[str, Any], epochs: EpochSteps, *, step: str | None = None, counted: int | None = None, texts: bool = False
) -> Point | None:
    """Return the point of one record; None where it has no whole step or no value.

    `step` names its counter where the table of names does not know it; `counted` is the step of a record without one.
    `texts`: numbers may be texts, as fairseq writes them.
    """
    if record.get("mode") in ("val", "valid", "test", "eval"):
        return None
    flat = dict(_flatten(record, texts=texts))
    known = STEP_NAMES if step is None else (step,)
    lowered = {name.lower(): name for name in flat}
    counter = next((lowered[name] for name in (n.lower() for n in known) if name in lowered), None)
    if counter is None or counter.lower() in EPOCH_NAMES:
        counter = _put_share(record, flat) or counter
    if counter is not None and counter.lower() in EPOCH_NAMES and (counted is not None or flat[counter] != int(flat[counter])):
        counter = None
    at = flat[counter] if counter is not None else counted
    if at is None or not math.isfinite(at) or at != int(at):
        return None
    epoch = next((flat[name] for name in EPOCH_NAMES if name in flat and name != counter), None)
    whole = int(at)
    if epoch is not None and counter is not None and math.isfinite(epoch):
        whole = epochs.step(epoch, whole)
    time = next((flat[name] for name in TIME_NAMES if name in flat), None)
    launch = next((int(flat[name]) for name in LAUNCH_NAMES if name in flat and math.isfinite(flat[name])), None)
    skip = {*STEP_NAMES, *TIME_NAMES, *LAUNCH_NAMES, counter} | (set() if counted is not None else {"epoch"})
    if counted is not None and "epoch" in flat:
        skip.discard("epoch")
    values = {name: value for name, value in flat.items() if name not in skip}
    if not values and not any(role_of(name) is Role.LOSS for name in record):
        return None
    # without a value where the loss was written and is no number
    return Point(0, whole, time, values, launch, counter is None)


def _put_share(record: Mapping[str, Any], flat: dict[str, float]) -> str | None:
    """Add the step of `"global_step/max_steps": "56/176"` (swift) to the numbers; returns its name."""
    for name, value in record.items():
        first = name.split("/")[0] if isinstance(value, str) and "/" in name else ""
        if first.lower() in STEP_NAMES and first.lower() not in EPOCH_NAMES and (share := SHARE_OF.match(value)):
            flat[first] = float(share[1])
            return first
    return None


def _flatten(
    record: Mapping[str, Any], prefix: str = "", depth: int = 0, *, texts: bool = False
) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        full = f"{prefix}{name}"
        if isinstance(value, dict) and "mean" in value and value.keys() <= SUMMARY_WORDS:
            value = value["mean"]  # a summary in place of a number
        if isinstance(value, dict) and depth < 6:
            yield from _flatten(value, f"{full}/", depth + 1, texts=texts)
        elif not isinstance(value, str) or texts or _is_measured(full):
            number = number_in(value)
            if number is not None:
                yield full, number



def _is_measured(name: str) -> bool:
    """Whether a text under this name may be a number: a counter, or a channel of a known role."""
    return name.lower() in STEP_NAMES or role_of(name) is not Role.IGNORED
