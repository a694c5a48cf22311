"""Open any training log: decide its format by its first bytes, hand it to its reader, and say what was read.

Encoding errors, half lines and other text do not stop a reader: they are skipped. A log without any point is an error
that names the known formats. A new format is one function here that recognises it, and one reader; a new dialect of
printed lines that the general reader does not know is one regular expression in `chronicle.toml`:

    [formats]
    mine = 'it (?P<step>\\d+) L=(?P<loss>\\S+)'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from chronicle.errors import UsageProblem
from chronicle.metrics.counters import EpochSteps
from chronicle.metrics.lines import PrintedLines
from chronicle.metrics.log import ATTEMPT_MARK, Point, join_steps, number_rows, parse_line, read_metrics
from chronicle.metrics.mlflow_log import SQLITE_HEAD, is_file_store_run, read_database, read_file_store, split_store
from chronicle.metrics.numbers import number_in
from chronicle.metrics.records import (
    RecordLines,
    TableLines,
    find_header,
    json_object,
    places_of,
    point_of_record,
    read_csv,
    read_document,
)
from chronicle.metrics.run_tables import read_runs_of_table
from chronicle.metrics.tensorboard_log import is_event_file, read_event_files
from chronicle.metrics.text import ANSI, SNIFF_BYTES, WRAPPED, encoding_of, is_gzip, log_lines, read_head
from chronicle.metrics.trackio_log import is_trackio_database, read_trackio
from chronicle.metrics.wandb_log import HEAD as WANDB_HEAD
from chronicle.metrics.wandb_log import read_wandb, wandb_files
from rollback.channels import JUDGED, LossKind, Role, role_of, totality_of, value_of
from rollback.errors import one_line

SHOWN_NAMES = 24  # names that a message lists
SHOWN_LINES = 40  # lines in which they are sought
HEAD_LINES = 20  # that tell JSON from other text
BINARY = ("TensorBoard", "MLflow", "W&B", "trackio")  # forms that are no text
STANDING_SHARE = 0.8  # of the points repeat the step before: that is no step
COUNTED = " (counted: the log names no step; --step NAME where it does)"
FEW_POINTS = 8  # rows without a number may be the beginning of a log
WORD_AND_NUMBER = re.compile(r"([^\W\d][\w./@%-]*)(?:\s*[:=]\s*|\s+)['\"]?[-+]?\.?\d")


class UnknownLog(UsageProblem):
    """No reader found a point in this log: it says what was read, which columns were seen, and how to name them."""


class NothingToWatch(UsageProblem):
    """A log was read and holds no loss, objective or reward: to report "0 events" of it would be false."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReading:
    """What a person said about a log: the names of its loss, step and LR, what to leave out, and a line format.

    `ignore` holds shell patterns of channel names. `pattern` is a regular expression with named groups, `step` among them.
    """

    loss: str | None = None
    step: str | None = None
    lr: str | None = None
    ignore: tuple[str, ...] = ()
    kind: LossKind | None = None
    pattern: re.Pattern[str] | None = None

    @property
    def names(self) -> frozenset[str]:
        """The names that a person gave: a line that holds one is read, whatever the table says of it."""
        return frozenset(name for name in (self.loss, self.step, self.lr) if name is not None)

    def loss_of(self, values: Mapping[str, float]) -> float | None:
        """The loss among the values of one point: the one that was named, else the total that the table knows."""
        return values.get(self.loss) if self.loss is not None else value_of(values, Role.LOSS)

    def role_of(self, name: str) -> Role:
        """Return the role of a channel: what was said about it, else what the table says."""
        if any(fnmatchcase(name, pattern) for pattern in self.ignore):
            return Role.IGNORED
        if name == self.loss:
            return {None: Role.LOSS, LossKind.LOSS: Role.LOSS, LossKind.REWARD: Role.REWARD}.get(self.kind, Role.OBJECTIVE)
        if name == self.lr:
            return Role.LR
        role = role_of(name)
        if role is Role.LOSS and self.loss is not None:
            return Role.SOURCE
        if role is Role.LR and self.lr is not None:
            return Role.IGNORED
        if role in (Role.LOSS, Role.SOURCE) and self.kind in (LossKind.REWARD, LossKind.ADVERSARIAL):
            return Role.OBJECTIVE
        return role


PLAIN = LogReading()


def line_format(name: str, formats: Mapping[str, str]) -> re.Pattern[str]:
    """Return the line format of this name, or `name` itself as one; raises UsageProblem where it has no group `step`."""
    text = formats.get(name, name)
    try:
        pattern = re.compile(text)
    except re.error as problem:
        raise UsageProblem(f"format `{text}` is no regular expression: {problem}") from problem
    if "step" not in pattern.groupindex or len(pattern.groupindex) < 2:
        known = ", ".join(formats) or "none in chronicle.toml"
        raise UsageProblem(
            f"format `{text}` names no step and value: expected named groups",
            f"(?P<step>\\d+) … (?P<loss>\\S+); known: {known}",
        )
    return pattern


def read_log(path: Path, reading: LogReading = PLAIN, left_out: list[str] | None = None) -> Iterator[Point]:
    """Yield the points of a log in file order; raises UnknownLog when there is none, OSError when it cannot be read.

    `left_out` gets a sentence for each file of records that could not be read to its end.

    `path` may be a file, a directory of TensorBoard event files, of an MLflow run or of W&B's offline mode, `mlflow.db#RUN`
    or `trackio.db#RUN`.
    """
    found = False
    seen: dict[str, None] = {}
    for point in _open(path, reading, seen, left_out):
        found = True
        yield point
    if not found and not (path.is_file() and form_of(path, reading) == "table"):  # a table may have no rows yet
        raise unread_log(path, reading, seen)


def unread_log(path: Path, reading: LogReading = PLAIN, seen: Iterable[str] = ()) -> UnknownLog:
    """The error of a log without a point: what it was taken for, the columns seen in it, and the way out."""
    known = "known: JSONL, CSV, trainer_state.json, printed lines, TensorBoard, MLflow, W&B, trackio"
    if path.is_dir():
        return UnknownLog(f"no point was read from the directory `{path}`: no event file or metric in it holds a number", known)
    form, head = form_of(path, reading), read_head(path)
    text = head.decode(encoding_of(head), errors="replace")
    if not text.strip():
        return UnknownLog(f"no point was read from `{path}`: the file is empty", known)
    if form in BINARY or "\0" in text:
        what = f"read as {form}, and it holds no number" if form in BINARY else "it is no text"
        return UnknownLog(f"no point was read from `{path}`: {what}", known)
    names = list(seen) or columns_in(form, text)
    first = next(line for line in text.splitlines() if line.strip()).strip()
    shown = f"columns seen: {_some(names)}" if names else f"no columns seen; its first line: `{one_line(first[:80])}`"
    return UnknownLog(
        f"no step with a loss, gradient norm or learning rate was found in `{path}` (read as {form}); {shown}",
        "name them with --loss NAME and --step NAME, or teach a line format: "
        f"--format '(?P<step>\\d+) (?P<loss>\\S+)'; {known}",
    )


def columns_in(form: str, text: str) -> list[str]:
    """The names that the beginning of a log gives to its numbers: keys, the cells of a header, or words before numbers."""
    lines = [line for line in text.splitlines() if line.strip()][:SHOWN_LINES]
    if "JSON" in form or "json" in form:
        return list(dict.fromkeys(re.findall(r'"([^"\\]{1,60})"\s*:', text)))
    cells = [cell.strip() for cell in re.split(r"[\t;,]", lines[0])]
    if len(cells) > 1 and not any(number_in(cell) is not None or WORD_AND_NUMBER.search(cell) for cell in cells):
        return cells
    named = (found[1].strip() for line in lines for found in WORD_AND_NUMBER.finditer(ANSI.sub("", line)))
    return [name for name in dict.fromkeys(named) if name]


def _open(path: Path, reading: LogReading, seen: dict[str, None], left_out: list[str] | None) -> Iterator[Point]:
    form = form_of(path, reading)
    if reading.pattern is not None and form not in BINARY:
        return _read_lines(path, partial(parse_taught, pattern=reading.pattern))
    if form == "MLflow":
        return read_file_store(path) if path.is_dir() else read_database(*split_store(path))
    if form == "TensorBoard":
        return read_event_files(path, left_out)
    if form == "W&B":
        return read_wandb(path, left_out)
    if form == "trackio":
        return read_trackio(*split_store(path))
    if form == "JSON":
        return read_document(path, reading.step)
    if form == "metrics.jsonl":
        return read_metrics(path)
    if form == "JSONL":
        return _read_lines(path, RecordLines(reading.step))
    if form == "table":
        runs = None if reading.step or reading.names else read_runs_of_table(path)
        return iter(*runs.values()) if runs is not None and len(runs) == 1 else read_csv(path, reading.step, reading.names)
    return _read_text(path, seen, reading)


def form_of(path: Path, reading: LogReading = PLAIN) -> str:
    """Return the form of a log: one of BINARY, `JSON`, `metrics.jsonl`, `JSONL`, `table` or `printed lines`."""
    store, run = split_store(path)
    if run is not None:
        return "trackio" if is_trackio_database(store) else "MLflow"
    if path.is_dir():
        return "MLflow" if is_file_store_run(path) else "W&B" if wandb_files(path) else "TensorBoard"
    head = read_head(path).lstrip()
    if head.startswith(SQLITE_HEAD):
        return "trackio" if is_trackio_database(path) else "MLflow"
    if head.startswith(WANDB_HEAD):
        return "W&B"
    if is_event_file(path):
        return "TensorBoard"
    records = _objects_in(head)
    if path.suffix == ".json" and head[:1] in (b"{", b"[") and not _are_lines(head, records):
        return "JSON"
    if head.startswith(b"{") and not head.startswith(WRAPPED.encode()) and records:
        return "metrics.jsonl" if _is_ours(head) and not is_gzip(path) else "JSONL"
    lines = head.decode(encoding_of(head), errors="replace").splitlines()
    return "printed lines" if find_header(lines, reading.names) is None else "table"


def _objects_in(head: bytes) -> list[Mapping[str, Any]]:
    """The first lines that are a JSON object each; Trainer's state is none, though it may be one line."""
    lines = (json_object(line.decode("utf-8", "replace")) for line in head.splitlines()[:HEAD_LINES] if line[:1] == b"{")
    return [record for record in lines if record is not None and "log_history" not in record]


def _are_lines(head: bytes, records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a `.json` file is one object a line, and not one object or list over many lines, or one without a step."""
    if len(head.splitlines()) > 1 or not records:
        return bool(records)
    return len(head) < SNIFF_BYTES and places_of(tuple(records[0])).step is not None


def _is_ours(head: bytes) -> bool:
    """Whether the lines are those of our own writer; other JSON lines go to the reader that knows more names."""
    lines = head.split(b"\n", 2)
    first = lines[1] if lines[0].startswith(ATTEMPT_MARK) and len(lines) > 1 else lines[0]
    return first.startswith(b'{"step":') and b'"t":' in first and parse_line(first) is not None


def _read_text(path: Path, seen: dict[str, None], reading: LogReading) -> Iterator[Point]:
    """Yield the points of printed lines; carriage returns end lines too, because progress bars overwrite themselves."""
    log = PrintedLines(seen, step=reading.step, named=reading.names)
    for line in log_lines(path):
        yield from log.feed(line)
    yield from log.flush()


def _read_lines(path: Path, parse: Callable[[str], Point | None]) -> Iterator[Point]:
    """Yield the points of the lines that a reader knows."""
    return number_rows(join_steps(point for line in log_lines(path) if (point := parse(line)) is not None))


def parse_taught(line: str, pattern: re.Pattern[str]) -> Point | None:
    """Return the point of a line by a taught format: its groups are the channels, `step` and `time` place it."""
    found = pattern.search(ANSI.sub("", line))
    if found is None or (not line.endswith("\n") and found.end() == len(line)):
        return None
    record = {name: text for name, text in found.groupdict().items() if text is not None}
    point = point_of_record(record, EpochSteps(), step="step", texts=True)
    return point if point is not None and point.values else None


class AnyLine:
    """Parse a growing log of any format that is written line by line: JSON, a table, printed lines, a taught format.

    The reader that knew the line before is asked first.
    """

    def __init__(self, reading: LogReading = PLAIN) -> None:
        self._readers: list[Callable[[str], Point | None]] = [
            RecordLines(reading.step), TableLines(reading.step, reading.names),
            PrintedLines(step=reading.step, named=reading.names),
        ]  # fmt: skip
        if reading.pattern is not None:
            self._readers = [partial(parse_taught, pattern=reading.pattern)]

    def __call__(self, line: bytes, row: int) -> Point | None:
        text, empty = line.decode("utf-8", errors="replace") + "\n", None
        for reader in self._readers:
            point = reader(text)
            if point is not None and point.values:
                self._readers.remove(reader)
                self._readers.insert(0, reader)
                return point._replace(row=row)
            empty = point or empty  # a row whose loss is no number
        return None if empty is None else empty._replace(row=row)


# --- What was read


class Contents:
    """What a log held: its form, the number of points, the steps, and each channel with its role."""

    def __init__(self, form: str, reading: LogReading = PLAIN) -> None:
        self.form, self.points = form, 0
        self.first_step: int | None = None
        self.last_step: int | None = None
        self.channels: dict[str, int] = {}
        self.reading = reading
        self._standing = 0  # points with the step of the point before
        self._counted = 0  # points whose step the log does not name
        self.left_out: list[str] = []  # what could not be read, a sentence each

    def note(self, point: Point) -> None:
        """Count one point."""
        self.points += 1
        self._counted += point.counted
        if self.first_step is None:
            self.first_step = point.step
        self._standing += point.step == self.last_step
        self.last_step = point.step
        for name in point.values:
            self.channels[name] = self.channels.get(name, 0) + 1

    def named(self, *roles: Role) -> list[str]:
        """The channels of these roles, the one that leads first."""
        return sorted((name for name in self.channels if self.reading.role_of(name) in roles), key=totality_of)

    @property
    def judged(self) -> tuple[str, ...]:
        """The channels that decide, the total first; a part of the loss decides only where there is no total."""
        return next((tuple(found) for role in JUDGED if (found := self.named(role))), ())

    def lines(self) -> list[str]:
        """The sentences that begin every report."""
        steps = "no step" if self.first_step is None else f"steps {self.first_step}–{self.last_step}"
        steps += COUNTED * (self._counted > 0)
        judged = self.named(*JUDGED)
        roles: Iterable[tuple[str, Sequence[str]]] = (
            ("loss", self.named(Role.LOSS)), ("parts", self.named(Role.SOURCE)), ("objective", self.named(Role.OBJECTIVE)),
            ("reward", self.named(Role.REWARD)), ("grad norm", self.named(Role.NORM)[:4]), ("lr", self.named(Role.LR)[:1]),
        )  # fmt: skip
        told = [f"{role} ← {_some(names)}" for role, names in roles if names]
        ignored = len(self.channels) - sum(self.reading.role_of(name) is not Role.IGNORED for name in self.channels)
        told += [f"{ignored} not watched"] * bool(ignored)
        with_loss = max((self.channels[name] for name in self.judged), default=0)
        points = f"{self.points} points"
        if 0 < with_loss < self.points:
            points += f" ({with_loss} with a loss)"
        read = f"read: {self.form}, {points}, {steps}; {'; '.join(told) if judged or told else 'no channel'}"
        return [read, *(f"not read: {what}" for what in self.left_out)]

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values: `channels` maps each name to its role and number of values."""
        roles = {name: {"role": self.reading.role_of(name).value, "points": count} for name, count in self.channels.items()}
        return {
            "form": self.form, "points": self.points, "first_step": self.first_step, "last_step": self.last_step,
            "steps_counted": self._counted > 0, "loss": list(self.judged), "channels": roles,
            "left_out": list(self.left_out),
        }  # fmt: skip

    def need_loss(self, source: str) -> None:
        """Raise NothingToWatch where points were read and none holds a loss, objective or reward."""
        if (self.channels or self.points >= FEW_POINTS) and not self.judged:
            held = f"the columns {_some(list(self.channels))}" if self.channels else "no number in any column"
            raise NothingToWatch(
                f"`{source}` holds no loss that is known: {self.points} points ({self.form}) with {held}",
                "name one with --loss NAME (and --step, --lr, --ignore, --kind loss|reward|adversarial)",
            )
        if self._standing > STANDING_SHARE * self.points >= STANDING_SHARE * FEW_POINTS:
            raise NothingToWatch(
                f"the steps of `{source}` stand still: {self.points} points ({self.form}) on the steps "
                f"{self.first_step}–{self.last_step}, so what was taken for the step is another number",
                "name the step with --step NAME, or teach the line: --format '(?P<step>\\d+) … (?P<loss>\\S+)'",
            )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(one_line(name) for name in names[:SHOWN_NAMES])
    return f"{shown}, … ({len(names)} in all)" if len(names) > SHOWN_NAMES else shown
