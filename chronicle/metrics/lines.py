"""Parse the lines that trainers print.

One general reader: a line is taken apart into named numbers, once for its shape (`shapes.py`); the table of `rollback.channels`
says what each name is, and the step is the counter that the line names (`COUNTERS`). Here the lines come together: values below
the line that names their step, epochs, ranks, records in braces. Tables and bars are readers of their own (`forms.py`).
Each form has a sample in `tests/metrics/dialects.py`, with its source.

Validation losses are no points. Prefixes of time, host and rank, ANSI colours, carriage returns and commas in numbers are
accepted; where several ranks print, the first one counts. A number that touches the end of a cut line is not trusted.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from chronicle.metrics.counters import THROUGH, EpochSteps, find_counter, whole
from chronicle.metrics.forms import FORMS
from chronicle.metrics.log import Point
from chronicle.metrics.numbers import number_of_text
from chronicle.metrics.records import SUMMARY, object_in, point_of_record
from chronicle.metrics.shapes import VALUE, Shape, Shapes, fields_in
from chronicle.metrics.text import ANSI, WRAPPED
from rollback.channels import JUDGED, TELLING, Role, canonical_name, role_of

MOST_SEEN = 40
RANK_FIRST = re.compile(
    r"^(?:\[default(\d+)\]:?|\(\w+ pid=(\d+)[^)]*\)|\[?rank[ _:=]?(\d+)\]?:?|(?P<first>\d+):(?!\d\d:\d\d)"
    r"|\[\d+,(\d+)\]<std\w+>:?) ?", re.IGNORECASE,
)
OURS = re.compile(r"chronicle(?: guard)?: | {6}(?:expected|found|where|likely): ")  # what chronicle says itself is no metric
STEP_BEFORE = re.compile(r"(?:\b|_)(?:step|batch|iter|iteration)\s*[=:#]?\s*(\d[\d,]*)", re.IGNORECASE)
MLPERF_STEPS = ("step", "step_num", "iteration", "samples_count", "epoch_num")
KEY_BEFORE = re.compile(r"(\w+):\s*$")
TOUCHES_END = re.compile(r"[\w.,+-]+$")  # of a cut line: it may go on behind the cut
SAME = 5e-4  # of a number: three digits of it
OTHERS_AT_MOST = 20  # lines in a row by another counter
RECENT_STEPS = 3  # a rank that lags this far behind repeats what was read


class PrintedLines:
    """The reader of a printed log, line by line; `feed` returns the points that a line completed, `flush` the last one."""

    def __init__(
        self, names: dict[str, None] | None = None, *, counted: int = 0, step: str | None = None,
        named: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """`counted` is the step of a line that names none (Trainer's dictionaries); -1 says that there is none.

        `named` are the names that a person gave, `step` the one of them that counts.
        """
        self._step, self._named_by = step, named
        self.names: dict[str, None] = {} if names is None else names  # all seen, for the message when none is known
        self._row, self._counted = 0, counted
        self._pending: Point | None = None
        self._form: Collection[str] = ()  # the names of the line that began it
        self._recent: deque[int] = deque(maxlen=RECENT_STEPS)
        self._rank: str | None = None
        self._loss: tuple[int, str] | None = None  # the last step with a loss, and the name of this
        self._announced: int | None = None  # the step of a line without values: those of the lines below it
        self._told: set[str] = set()  # the names found below it
        self._held: dict[str, float] | None = None  # what waits for a loss; None below the header of a block
        self._of_epoch = False  # whether that line named an epoch
        self._lines_of_epochs: bool | None = None  # whether each epoch is one record of such lines; the second one shows it
        self._first_epoch: Point | None = None
        self._finer, self._since = 0, 0  # lines with a loss and a counter of steps: all, and since an epoch's own line
        self._counter: int | None = None  # which of COUNTERS the lines with a loss name
        self._last_step: int | None = None
        self._others = 0  # lines since then that name another
        self._forms = [form() for form in FORMS]
        self._shapes = Shapes()
        self._channels: dict[str, str] = {}
        self._inner = False
        self._epochs = EpochSteps()
        self._owners: dict[str, str] = {}
        self._ranks: dict[str, PrintedLines] = {}  # where each line begins with its rank: a reader for each
        self._first, self._falls = -1, False  # the highest number that a line began with, and whether one was lower
        self._heard: str | None = None  # the rank that is read: the first one with a point

    def feed(self, line: str) -> list[Point]:
        """Read one line; `\\r` inside it was made a line end by the caller."""
        found = self(line)
        return [] if found is None else self._join(found)

    def __call__(self, line: str) -> Point | None:
        """What one line adds, as `parse` has it; the next line that names no step is of the one after this."""
        if (found := self.parse(line)) is not None:
            self._counted = max(self._counted, found.step) + 1
        return found

    def flush(self) -> list[Point]:
        """Return the point that waits for further lines of its step."""
        pending, self._pending = self._pending or self._take_first_epoch(), None
        if pending is None:
            return []
        self._row += 1
        return [pending._replace(row=self._row - 1)]

    def _join(self, found: Point) -> list[Point]:
        """Add what a line said to the point of its step, or end that point and begin another."""
        pending = self._pending
        if pending is not None and pending.step == found.step:
            if self._is_added(found.values, pending):
                return []
        elif pending is not None and 0 < pending.step - found.step <= RECENT_STEPS:
            if _is_judged(found.values) and not _is_judged(pending.values):
                # two counters: what was printed under the number of the next step belongs to this loss
                self._pending = found._replace(values={**pending.values, **found.values})
                return []
            if found.step in self._recent:
                return []  # a rank that lags behind
        done = self.flush()
        self._recent.append(found.step)
        self._pending, self._form = found, found.values.keys()
        return done

    def _is_added(self, values: Mapping[str, float], pending: Point) -> bool:
        """Whether another line of the same step belongs to its point; the same names with other numbers do not.

        A line of another form that uses a name again (a window's median, and then a running mean) says another series.
        """
        known = pending.values
        shared = values.keys() & known.keys()
        again = all(_is_same(values[name], known[name]) for name in shared)
        if not again and values.keys() == self._form:
            return False
        added = dict(known)
        for name, value in values.items():
            added.setdefault(name if again or name not in known else f"{name} (2)", value)
        self._pending = pending._replace(values=added)
        return True

    def parse(self, line: str) -> Point | None:
        """Return what one line adds: a point, or the part of one."""
        if "\x1b" in line:
            line = ANSI.sub("", line)
        if line.startswith(WRAPPED):
            line = str((object_in(line.strip()) or {}).get("log", line))
        whole_line = line.rstrip("\r\n")
        line = TOUCHES_END.sub("", line) if whole_line == line else whole_line
        if OURS.match(line) is not None:
            return None
        ranked = RANK_FIRST.match(line)
        if ranked is not None:
            rest = line[ranked.end() :] + "\n"
            found = self._parse_ranked(next(part for part in ranked.groups() if part), rest)
            if found is not None or self._heard is not None or not ranked["first"] or not self._is_count(int(ranked["first"])):
                return found
        line = line.replace("'s ", "-")  # LightGBM: "training's binary_logloss"
        shape = self._shapes.of(line)
        plain = line[shape.plain :] if shape.plain else line
        if self._named_by:
            asked = self._parse_asked(line, shape)
            if asked is not None:
                return asked
        for form in self._forms:
            known = form.feed(plain)
            if known is not None:
                return Point(0, known.step, shape.time_in(line), self._named(known.values)) if _tells(known.values) else None
        if shape.begins_epoch is not None:
            return self._begin_epoch(int(line[shape.begins_epoch]))
        if not shape.is_hinted:
            self._announce(line, shape)
            return None
        if self._is_other_rank(line, shape):
            return None
        return self._parse_plain(line, shape)

    def _is_count(self, number: int) -> bool:
        """Whether the number that lines begin with, and no rank was told by, counts: it rises from line to line."""
        rises, self._first = number > self._first, max(number, self._first)
        self._falls = self._falls or not rises
        return not self._falls

    def _parse_asked(self, line: str, shape: Shape) -> Point | None:
        """Read the names that a person gave (`name: value`, `name=value`, `name value`) and what else is known."""
        found = {}
        for name in self._named_by:
            at = re.search(rf"(?<![\w./]){re.escape(name)}\s*[:=]?\s*{VALUE}", line)
            if at is not None:
                found[name] = number_of_text(at["value"], at["unit"])
        if self._step is not None:
            count = found.pop(self._step, None)
        else:
            counter = find_counter(line)
            count = None if counter is None else counter.step_in(line, self._epochs)
        if not found or count is None or count != int(count):
            return None
        return Point(0, int(count), shape.time_in(line), {**self._named(fields_in(line)), **found})

    def _parse_ranked(self, rank: str, line: str) -> Point | None:
        """Read a line that began with its rank; what other ranks print of the same steps is left out."""
        if self._heard is not None and rank != self._heard:
            return None
        found = self._ranks.setdefault(
            rank, PrintedLines(self.names, counted=self._counted, step=self._step, named=self._named_by)
        ).parse(line)
        if found is not None:
            self._heard = rank
        return found

    def _parse_plain(self, line: str, shape: Shape) -> Point | None:
        if "{" in line:
            point = _parse_braces(line, self._counted, self._epochs)
            if point is not None and point.counted and self._counter is not None:
                return None  # other lines name their steps
            if point is not None and (point.values or self._counted > 0):
                return point._replace(time=point.time or shape.time_in(line))
        self._inner = self._inner or shape.is_inner
        if shape.is_evaluation or (self._inner and shape.is_epoch_mean):
            return None
        if len(self.names) < MOST_SEEN:
            self.names.update(dict.fromkeys(shape.names))
        if self._is_epoch_mean(shape):
            return None
        found = self._step_of(line, shape)
        values = shape.values_in(line)
        blank = shape.is_blank and self._loss is not None
        if found is None:
            if shape.says_lost and self._loss is not None:
                step, name = self._loss
                return Point(0, step, None, self._named({name: math.nan}))
            return self._below(values)
        if not blank and not shape.tells:
            self._announce(line, shape)
            return None
        self._announced = None
        if shape.loss is not None:
            self._loss = (found, shape.loss)
        return Point(0, found, shape.time_in(line), self._named(values))

    def _is_epoch_mean(self, shape: Shape) -> bool:
        """Whether this is the mean of an epoch whose steps are printed: it names an epoch, and no step."""
        if shape.counter is not None or shape.leads is not None or shape.epoch is None or not self._finer:
            return False
        is_mean = self._since > 0 or not shape.measures
        self._since = 0 if shape.measures else self._since
        return is_mean

    def _step_of(self, line: str, shape: Shape) -> int | None:
        """The step by the counter that the line names, by the number that it begins with, or by its epoch."""
        if shape.counter is not None:
            step = shape.counter.step_in(line, self._epochs)
            if shape.measures:
                self._finer, self._since = self._finer + 1, self._since + 1
            return self._by_one_counter(shape.counter.place, step, told=shape.measures)
        if shape.leads is not None:
            return self._epochs.plain(whole(line[shape.leads]))
        return None if shape.epoch is None else self._epochs.plain(whole(line[shape.epoch]))

    def _by_one_counter(self, counter: int | None, step: int | None, *, told: bool) -> int | None:
        """The step by the counter of the first line with a loss: a line that counts by another one is of the last step.

        Where the first counter is not seen any more, another one leads (a later stage, another program).
        """
        if counter is None or counter == self._counter or self._counter is None:
            self._others = 0
            if told and counter is not None:
                self._counter = counter
            self._last_step = step
            return step
        self._others += 1
        if told and self._others > OTHERS_AT_MOST:
            self._counter, self._last_step = counter, step
        return self._last_step

    def _begin_epoch(self, epoch: int) -> Point | None:
        """A line said that an epoch begins: the steps below it may begin again, or it has no steps and is one itself."""
        self._epochs.open = epoch
        first = self._take_first_epoch()
        if first is not None:
            self._lines_of_epochs = True
        if not self._finer and self._lines_of_epochs is not False:
            self._announced, self._told = epoch, set()
            self._held, self._of_epoch = {}, True
        return first

    def _take_first_epoch(self) -> Point | None:
        """The record of the first epoch, which was kept back; None where lines with a counter came after it."""
        first, self._first_epoch = self._first_epoch, None
        return None if self._finer else first

    def _announce(self, line: str, shape: Shape) -> None:
        """Remember the step of a line that holds nothing else, as a header does: values may stand in the lines below it."""
        if shape.announced is not None:
            is_block = shape.announced.place != THROUGH  # it names the step as its own
            self._finer += is_block
            self._announced, self._told = shape.announced.step_in(line, self._epochs), set()
            self._held, self._of_epoch = None if is_block else {}, False

    def _below(self, values: Mapping[str, float]) -> Point | None:
        """The part of a point that stands in a line without a step, below the line that named it; each name once."""
        if self._announced is None or not values.keys() or values.keys() & self._told:
            if values.keys() & self._told:
                self._announced = None  # these lines do not belong to that one
                if self._of_epoch and not self._lines_of_epochs:
                    self._lines_of_epochs, self._first_epoch = False, None  # several in an epoch, and none is counted
            return None
        self._told |= values.keys()
        if self._held is not None:  # the LR may stand above the loss
            self._held |= values
            if not _is_judged(self._held):
                return None
            values, self._held = self._held, {} if self._of_epoch else None
            if self._of_epoch and not self._lines_of_epochs:
                known = self._first_epoch.values if self._first_epoch is not None else {}
                self._first_epoch = Point(0, self._announced, None, {**known, **self._named(values)})
                return None
        return Point(0, self._announced, None, self._named(values)) if _tells(values) else None

    def _named(self, values: Mapping[str, float]) -> dict[str, float]:
        """Give each name one channel."""
        channels = self._channels
        return {channels.get(tag) or self._channel(tag): value for tag, value in values.items()}

    def _channel(self, tag: str) -> str:
        """The channel of a name: `lm loss` is `loss`, unless another name of this log is."""
        channel = canonical_name(tag)
        if self._owners.setdefault(channel, tag) != tag:
            channel = tag if self._owners.setdefault(tag, tag) == tag else f"{tag} (2)"
        self._channels[tag] = channel
        return channel

    def _is_other_rank(self, line: str, shape: Shape) -> bool:
        """Whether another rank than the first one seen printed this line."""
        if shape.rank is None:
            return False
        rank = line[shape.rank]
        if self._rank is None and shape.counter is not None and shape.tells:
            self._rank = rank
        return self._rank is not None and rank != self._rank


def _is_same(value: float, known: float) -> bool:
    """Whether a number of a step is the one that is known of it, printed with as many or with fewer digits."""
    return value == known or abs(value - known) <= SAME * abs(known)


def _tells(values: Mapping[str, float]) -> bool:
    return any(role_of(name) in TELLING for name in values)


def _is_judged(values: Mapping[str, float]) -> bool:
    return any(role_of(name) in JUDGED for name in values)


def _parse_braces(line: str, counted: int, epochs: EpochSteps) -> Point | None:
    """Parse a record inside a line: Trainer's dictionaries, JSON behind a prefix (fairseq), MLPerf's records."""
    start, end = line.find("{"), line.rfind("}")
    record = object_in(line[start : end + 1])
    if record is None:
        return None
    if "event_type" in record and "key" in record:
        record = _of_mlperf(str(record["key"]), record.get("value"), record.get("metadata") or {}, record.get("time_ms"))
    elif ":::MLP" in line and (key := KEY_BEFORE.search(line[:start])) is not None:  # the form of before v0.6
        record = _of_mlperf(key[1], record.get("value"), record, None)
    before = STEP_BEFORE.search(line[:start])
    point = point_of_record(record, epochs, counted=counted if before is None else whole(before[1]), texts=True)
    if point is None or (point.values and not _tells(point.values)) or SUMMARY in record:
        return None
    is_counted = point.counted and before is None
    if is_counted and point.values and not _is_judged(dict.fromkeys(map(str, record), 0.0)):
        return None  # a setting: a line without a step makes one only where it holds a loss
    named: dict[str, float] = {}
    for name, value in point.values.items():
        channel = canonical_name(name)
        named[name if channel in named else channel] = value
    return point._replace(values=named, counted=is_counted)


def _of_mlperf(key: str, value: object, meta: Mapping[str, Any], milliseconds: float | None) -> dict[str, Any]:
    """A record of MLPerf as one of names and numbers; empty where it names no step."""
    step = next((meta[name] for name in MLPERF_STEPS if name in meta), None)
    fields = {**(value if isinstance(value, dict) else {key: value}), **meta}
    known = {name: cell for name, cell in fields.items() if role_of(str(name)) is not Role.IGNORED}
    return {} if step is None else {**known, "step": step, "t": None if milliseconds is None else milliseconds / 1000}
