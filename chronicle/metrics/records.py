"""Logs of named fields: CSV and TSV tables, JSON lines, W&B history, Trainer's `trainer_state.json`.

`places_of` decides for both which names place a point. A table has a header with a step column and one row per logged step; an
empty cell means "not recorded". JSON records are flattened. W&B's `_step` counts log calls: where a record names the trainer's
own step, that one counts. Our own `metrics.jsonl` is read in `log.py`.
"""

from __future__ import annotations

import ast
import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from chronicle.metrics.counters import EpochSteps
from chronicle.metrics.log import NON_FINITE, Point, join_steps, number_rows
from chronicle.metrics.numbers import non_finite, number_in
from chronicle.metrics.text import ANSI, PREFIX, log_lines
from rollback.channels import EPOCH_NAMES, LAUNCH_NAMES, STEP_NAMES, TIME_NAMES, Role, role_of

VALUE_NAME = "value"  # TensorBoard's own CSV download: `Wall time,Step,Value`
BETWEEN = " - "  # run and metric in a column of W&B's download of a panel
BANDS = ("__MIN", "__MAX")
HEAD_LINES = 50  # blank lines and comments that may precede the header
LOOK_ROWS = 512  # rows read ahead to learn what "nan" means in a column
GAPS, GAP_SHARE, LONGER = 3, 0.3, 4  # least gaps and least share of NaN in a column that has gaps; times the usual gap


class Places(NamedTuple):
    """Which of the names of a record or a table place a point; None where none does."""

    step: str | None
    epoch: str | None  # beside the step
    time: str | None
    launch: str | None


@lru_cache(maxsize=512)
def places_of(names: tuple[str, ...], step: str | None = None) -> Places:
    """Find the step, epoch, time and launch among names. `step` is its counter where the table of names does not know it."""
    lowered = {name.lower(): name for name in names}

    def first(known: Iterable[str]) -> str | None:
        return next((lowered[name] for name in known if name in lowered), None)

    counter, epoch = first(STEP_NAMES if step is None else (step.lower(),)), first(EPOCH_NAMES)
    return Places(counter, None if epoch == counter else epoch, first(TIME_NAMES), first(LAUNCH_NAMES))


# --- Tables


class Table:
    """The columns of one table: step, time, launch, channels. `parse` makes a point of a row's cells.

    Each column keeps its own name. `step` names the step column where the table of names does not know it.
    """

    def __init__(self, head: str, step: str | None = None) -> None:
        head = ANSI.sub("", head)
        self.delimiter = max("\t;,", key=head.count)
        names = [name.strip().strip('\ufeff"#').strip() for name in next(csv.reader([head], delimiter=self.delimiter), [])]
        self._prefix = PREFIX.match(names[0]) if names else None  # of a program that prints a table behind time and host
        if self._prefix is not None:
            names[0] = names[0][self._prefix.end() :].strip()
        self.names = names
        places = places_of(tuple(names), step)
        self.step_at, self._epoch_at, self._time_at, self._launch_at = (
            None if name is None else names.index(name) for name in places
        )
        self._epochs = EpochSteps()
        channels = [
            (at, _channel(name)) for at, name in enumerate(names) if name not in places and not name.endswith(BANDS)
        ]
        twice = {name for _, name in channels if sum(name == other for _, other in channels) > 1}
        self.channels = [(at, f"{names[at]} ({at})" if name in twice else name) for at, name in channels]

    def parse(self, cells: Sequence[str], row: int) -> Point | None:
        """Return the point of one row; None where its step is no number."""
        if self._prefix is not None and cells:
            cells = [PREFIX.sub("", cells[0]), *cells[1:]]
        at = row if self.step_at is None else self._step(cells, self.step_at)
        if at is None:
            return None
        epoch, launch = self._number(cells, self._epoch_at), self._number(cells, self._launch_at)
        step = at if epoch is None else self._epochs.step(epoch, at)
        try:
            values = {name: float(cells[at]) for at, name in self.channels}
        except (ValueError, IndexError):
            values = {name: value for at, name in self.channels if (value := self._number(cells, at)) is not None}
        whole = None if launch is None or not math.isfinite(launch) else int(launch)
        return Point(row, step, self._number(cells, self._time_at), values, whole, self.step_at is None)

    def _step(self, cells: Sequence[str], at: int) -> int | None:
        try:
            return int(cells[at])  # a float has 53 bits
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
    """Parse a growing table line by line; the header comes first, and again where the file was rewritten.

    Where something else comes first, no line is a row.
    """

    def __init__(self, step: str | None = None, named: frozenset[str] = frozenset()) -> None:
        self._table: Table | None = None
        self._step, self._names, self._row = step, named, 0
        self._is_none = False

    def __call__(self, line: str) -> Point | None:
        text = ANSI.sub("", line).replace("\0", "").strip("\ufeff \t\r\n")
        if not text or self._is_none or (self._table is not None and text[0] == "#"):
            return None
        if is_header(text, self._names):
            self._table = Table(text, self._step)
            return None
        if self._table is None:
            self._is_none = text[0] != "#"
            return None
        try:
            cells = next(csv.reader([text], delimiter=self._table.delimiter), [])
        except csv.Error:
            return None
        point = self._table.parse(cells, self._row)
        whole = len(cells) > max((at for at, _ in self._table.channels), default=0)
        if point is None or not (point.values or whole):
            return None
        self._row += 1
        return point


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
    opened = open_table(path, step, named)
    if opened is not None:
        table, rows = opened
        points = (point for row, cells in enumerate(rows) if (point := table.parse(cells, row)) is not None)
        yield from join_steps(_drop_unrecorded(points))


def open_table(
    path: Path, step: str | None = None, named: frozenset[str] = frozenset()
) -> tuple[Table, Iterator[list[str]]] | None:
    """The head of a table, and the cells of its rows; None where the file begins with something else."""
    lines = log_lines(path, newline="")
    head = find_header(lines, named)
    if head is None:
        return None
    table = Table(head, step)
    return table, _cells(csv.reader(_rows(lines), delimiter=table.delimiter))


def _rows(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if line[:1] == "#":
            continue
        if line[-1:] not in "\r\n" and len(line) > 1:  # the file is cut here: its last number may go on
            line = line[: max(line.rfind(mark) for mark in ",;\t") + 1]
        if "\x1b" in line:
            line = ANSI.sub("", line)
        yield line.replace("\0", "") if "\0" in line else line


def _cells(rows: Iterator[list[str]]) -> Iterator[list[str]]:
    """The rows that hold something; one that cannot be read is a row without a number."""
    while True:
        try:
            cells = next(rows)
        except csv.Error:
            yield []
            continue
        except StopIteration:
            return
        if any(cells):
            yield cells


def _drop_unrecorded(points: Iterator[Point]) -> Iterator[Point]:
    """Remove each NaN that means "not recorded"; a run of NaN four times as long as usual is kept."""
    first = list(islice(points, LOOK_ROWS))
    with_nan = {name for point in first for name, value in point.values.items() if value != value}
    gaps = {name: gap for name in with_nan if (gap := _usual_gap(first, name))}
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
    tail = name.rpartition(BETWEEN)[2]
    return "loss" if tail.lower() == VALUE_NAME else tail


# --- JSON records

SHARE_OF = re.compile(r"(\d+)/\d+")  # a step of all
SUMMARY_WORDS = {"mean", "std", "num", "count", "min", "max", "median", "sum"}
SUMMARY = "train_runtime"  # Trainer's last record: its train_loss is the mean of the run, not a point of it
PLACING = frozenset((*STEP_NAMES, *TIME_NAMES, *LAUNCH_NAMES))
AS_JSON = (("'", '"'), (": nan", ": NaN"), (": inf", ": Infinity"), (": -inf", ": -Infinity"), (": None", ": null"))


def json_object(text: str) -> dict[str, Any] | None:
    """A JSON object; None for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def object_in(text: str) -> dict[str, Any] | None:
    """A JSON object, or a dictionary as Python prints it; None for anything else."""
    as_json = text
    if '"' not in text:
        for python, instead in AS_JSON:
            as_json = as_json.replace(python, instead)
    record = json_object(as_json)
    if record is not None:
        return record
    try:
        found = ast.literal_eval(text.replace(": nan", ": 'nan'").replace(": inf", ": 'inf'"))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class RecordLines:
    """Parse JSON lines one by one; None where a line is no object with a step."""

    def __init__(self, step: str | None = None) -> None:
        self._counted = Counted(step)

    def __call__(self, line: str) -> Point | None:
        record = json_object(line) if line.lstrip()[:1] == "{" else None
        return None if record is None else self._counted.point(record)


def points_of_records(records: Iterable[Mapping[str, Any]], step: str | None = None) -> Iterator[Point]:
    """The points of records, those of one step joined."""
    counted = Counted(step)
    return number_rows(join_steps(point for record in records if (point := counted.point(record)) is not None))


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
            if counted is not None and _has_loss(counted.values):
                found, self._next = counted, 0
        if found is None:
            return None
        self._measured = self._measured or _has_loss(found.values)
        if not found.values and not self._measured:
            return None
        self._begun = True
        self._next = None if self._next is None else self._next + 1
        return found


def _has_loss(names: Iterable[str]) -> bool:
    return any(role_of(name) is Role.LOSS for name in names)


def read_document(path: Path, step: str | None = None) -> Iterator[Point]:
    """Yield the points of one JSON document: Trainer's `log_history`, a list of records, or columns (Keras' history).

    None where its form is another.
    """
    try:
        state = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return
    history = state.get("log_history", state) if isinstance(state, dict) else state
    if isinstance(history, list):
        yield from points_of_records((one for one in history if isinstance(one, dict) and SUMMARY not in one), step)
    elif isinstance(history, dict):
        columns = {name: column for name, column in history.items() if isinstance(column, list)}
        is_counted = places_of(tuple(columns), step).step is None
        for point in join_steps(_drop_unrecorded(points_of_records(_records_of(columns), step))):
            yield point._replace(counted=is_counted)


def _records_of(columns: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """The rows of columns, a shorter one filled up with nothing; where no column holds the steps they are counted."""
    for row, cells in enumerate(zip_longest(*columns.values())):
        numbers = ((name, number_in(cell)) for name, cell in zip(columns, cells, strict=True))
        yield {"step": row, **{name: number for name, number in numbers if number is not None}}


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
    counter, epoch, time, launch = places_of(tuple(flat), step)
    if counter is not None and counter.lower() in EPOCH_NAMES and (counted is not None or flat[counter] % 1 != 0):
        counter = None
    at = counted if counter is None else flat[counter]
    if at is None or not math.isfinite(at) or at != int(at):
        return None
    whole = int(at)
    if epoch is not None and counter is not None and math.isfinite(flat[epoch]):
        whole = epochs.step(flat[epoch], whole)
    session = None if launch is None or not math.isfinite(flat[launch]) else int(flat[launch])
    values = {name: value for name, value in flat.items() if name != counter and name not in PLACING}
    if counted is not None and "epoch" in flat and counter != "epoch":
        values["epoch"] = flat["epoch"]
    if not values and not _has_loss(record):
        return None
    # without a value where the loss was written and is no number
    return Point(0, whole, None if time is None else flat[time], values, session, counter is None)


def _flatten(
    record: Mapping[str, Any], prefix: str = "", depth: int = 0, *, texts: bool = False
) -> Iterator[tuple[str, float]]:
    """The numbers of a record by their full names; `"global_step/max_steps": "56/176"` (swift) is a step, too."""
    for name, value in record.items():
        if type(value) is float or type(value) is int:
            yield prefix + name, value
            continue
        full = f"{prefix}{name}"
        if isinstance(value, dict) and "mean" in value and value.keys() <= SUMMARY_WORDS:
            value = value["mean"]  # a summary in place of a number
        if isinstance(value, dict) and depth < 6:
            yield from _flatten(value, f"{full}/", depth + 1, texts=texts)
            continue
        first = full if full.lower() in STEP_NAMES else str(name).partition("/")[0]
        share = SHARE_OF.fullmatch(value) if isinstance(value, str) else None
        if share is not None and first.lower() in STEP_NAMES:
            yield first, float(share[1])
        elif not isinstance(value, str) or texts or value in NON_FINITE or _is_measured(full):
            number = number_in(value)
            if number is not None:
                yield full, number


def _is_measured(name: str) -> bool:
    """Whether a text under this name may be a number: a counter, or a channel of a known role."""
    return name.lower() in STEP_NAMES or role_of(name) is not Role.IGNORED
