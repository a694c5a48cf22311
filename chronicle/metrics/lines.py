"""Parse the lines that trainers print.

One general reader: a line is taken apart into `name: value`, `name=value` and (for names of the table) `name value`; the
table of `rollback.channels` says what each name is, and the step is the counter that the line names (`COUNTERS`). Forms whose
step and values stand in different lines are readers of their own (`forms.py`); lines of epochs and MLPerf's records are here.
Each form has a sample in `tests/metrics/dialects.py`, with its source.

Validation losses are no points. Prefixes of time, host and rank, ANSI colours, carriage returns and commas in numbers are
accepted; where several ranks print, the first one counts. A number that touches the end of a cut line is not trusted.
"""

from __future__ import annotations

import ast
import datetime
import json
import math
import re
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from chronicle.metrics.counters import COUNT, EpochSteps, find_step, whole
from chronicle.metrics.fields import VALUE, fields_in
from chronicle.metrics.forms import FORMS
from chronicle.metrics.log import Point
from chronicle.metrics.numbers import NUMBER, number_in, number_of_text
from chronicle.metrics.records import point_of_record
from chronicle.metrics.text import ANSI, PREFIX
from rollback.channels import (
    EVAL_WORDS,
    HINTS,
    JUDGED,
    TELLING,
    Role,
    canonical_name,
    printed_names,
    role_of,
)

BLANK = re.compile(  # a loss that was written and is no number
    rf"(?<![\w/])(?:(?:train|training)[ _])?(?:{printed_names()})(?![\w/-])(?:\s*[:=]\s*|\s+(?:is\s+)?)"
    r"['\"]?(?:none|null|nil|n/?a|<na>|skipped|-{2,}|\*{2,})(?![\w.-])['\"]?", re.IGNORECASE,
)  # fmt: skip
SAID = re.compile(  # `Loss is nan, stopping training`: a line without a step, often the last one
    r"\bloss(?: value)? (?:is|was|became|has become|turned|=)(?: now)? (?:nan|[-+]?inf|not finite|non-?finite)\b"
    r"|\b(?:nan|inf|infinite|non-?finite)(?: or inf)? (?:train(?:ing)? )?loss\b", re.IGNORECASE,
)  # fmt: skip
OTHER_LOSS = re.compile(rf"\b(?!value)(?:{EVAL_WORDS})\w*[_ /-]*loss\b|\bvl:|\btel:", re.IGNORECASE)
EVALUATION = re.compile(rf"(?:^|[\s\[({{|])(?:{EVAL_WORDS})(?:[\s\])}}:|(]|$)", re.IGNORECASE)
COUNT_WITHIN = re.compile(  # `Train loss 120 0.53`: the step comes first
    r"\bloss (\d+) (?=[-+]?(?:\d+\.\d|nan|inf))", re.IGNORECASE
)
NUMBER_FIRST = re.compile(rf"({NUMBER}) (avg loss|loss|rate)(?=,)")  # `0.53, 0.61 avg loss, 0.001 rate,`
STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)")
RANK_FIRST = re.compile(
    r"^(?:\[default(\d+)\]:?|\(\w+ pid=(\d+)[^)]*\)|\[?rank[ _:=]?(\d+)\]?:?|(?P<first>\d+):(?!\d\d:\d\d)"
    r"|\[\d+,(\d+)\]<std\w+>:?) ?", re.IGNORECASE,
)
OURS = re.compile(r"chronicle(?: guard)?: | {6}(?:expected|found|where|likely): ")  # what chronicle says itself is no metric
RANK = re.compile(r"\[default(\d+)\]|\[?\brank[ _:=]*(\d+)\b\]?|\bDP=(\d+)\|", re.IGNORECASE)

EPOCH = re.compile(rf"\bepoch(?:s)?\s*[:=\[]?\s*{COUNT}", re.IGNORECASE)  # the last resort
LEADS = re.compile(rf"\s*{COUNT}(?:\s*[:|]\s|/\d+(?=[ ,;:])(?!\s*\[))")  # a line that begins with its step: `120 | loss 0.53`
ANNOUNCED = re.compile(
    r"(?<![\w/.])(?:learning iteration\s+|(?:global[_ ]?step|iteration|step|completed step)\s*[:=]?\s*(?!\d[\d,]*\s*[/%]))"
    + COUNT, re.IGNORECASE,
)  # fmt: skip
EPOCH_LINE = re.compile(  # a line that says which epoch begins, and nothing else
    r"(?:^|[\s:>|\]=*#-])(?:start(?:ing)? )?epoch\s*[:#=]?\s*(?P<at>\d+)(?:\s*(?:/|of)\s*\d+)?\s*[:.=*#-]*\s*$", re.IGNORECASE
)
OTHER_EPOCH = re.compile(  # not that
    r"\b(?:best|from|after|until|end|resum|load|sav|restor|checkpoint|eval|valid|test)", re.IGNORECASE
)
STEP_BEFORE = re.compile(r"(?:\b|_)(?:step|batch|iter|iteration)\s*[=:#]?\s*(\d[\d,]*)", re.IGNORECASE)
KEY_BEFORE = re.compile(r"(\w+):\s*$")
EPOCH_MEAN = re.compile(r"\| train \| epoch \d+ \|")  # fairseq: where single steps are printed too, no point of its own
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
        self._loss: Point | None = None  # the last step with a loss, and this loss as NaN
        self._announced: int | None = None  # the step of a line without values: those of the lines below it
        self._told: set[str] = set()  # the names found below it
        self._held: dict[str, float] | None = None  # below a line that names an epoch: what waits for a loss
        self._lines_of_epochs: bool | None = None  # whether each epoch is one record of such lines; the second one shows it
        self._first_epoch: Point | None = None
        self._finer, self._since = 0, 0  # lines with a loss and a counter of steps: all, and since an epoch's own line
        self._counter: int | None = None  # which of COUNTERS the lines with a loss name
        self._last_step: int | None = None
        self._others = 0  # lines since then that name another
        self._forms = [form() for form in FORMS]
        self._inner = False
        self._epochs = EpochSteps()
        self._owners: dict[str, str] = {}
        self._ranks: dict[str, PrintedLines] = {}  # where each line begins with its rank: a reader for each
        self._first, self._falls = -1, False  # the highest number that a line began with, and whether one was lower
        self._heard: str | None = None  # the rank that is read: the first one with a point

    def feed(self, line: str) -> list[Point]:
        """Read one line; `\\r` inside it was made a line end by the caller."""
        found = self.parse(line)
        return [] if found is None else self._join(found)

    def flush(self) -> list[Point]:
        """Return the point that waits for further lines of its step."""
        pending, self._pending = self._pending or self._take_first_epoch(), None
        if pending is None:
            return []
        self._row += 1
        return [pending._replace(row=self._row - 1)]

    def passed(self, step: int) -> None:
        """A line of this step was read: the next line that names none is of the one after it."""
        self._counted = max(self._counted, step) + 1

    def _join(self, found: Point) -> list[Point]:
        """Add what a line said to the point of its step, or end that point and begin another."""
        self.passed(found.step)
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
        if "loss " in line or "loss," in line:
            line = NUMBER_FIRST.sub(r"\2: \1", COUNT_WITHIN.sub(r"step \1 loss ", line))
        whole, line = line, PREFIX.sub("", line, count=1) if line[:1] in "0123456789[ADFJMNOS" else line
        if self._named_by:
            asked = self._parse_asked(line)
            if asked is not None:
                return asked
        for form in self._forms:
            known = form.feed(line)
            if known is not None:
                return Point(0, known.step, _time(line), self._named(known.values)) if _tells(known.values) else None
        begins = EPOCH_LINE.search(line)
        if begins is not None and OTHER_EPOCH.search(line) is None:
            return self._begin_epoch(int(begins["at"]))
        plain, line = line, whole
        if not any(hint in line for hint in HINTS):
            self._announce(plain)
            return None
        if self._is_other_rank(line):
            return None
        return self._parse_plain(line, plain)

    def _is_count(self, number: int) -> bool:
        """Whether the number that lines begin with, and no rank was told by, counts: it rises from line to line."""
        rises, self._first = number > self._first, max(number, self._first)
        self._falls = self._falls or not rises
        return not self._falls

    def _parse_asked(self, line: str) -> Point | None:
        """Read the names that a person gave (`name: value`, `name=value`, `name value`) and what else is known."""
        found = {}
        for name in self._named_by:
            at = re.search(rf"(?<![\w./]){re.escape(name)}\s*[:=]?\s*{VALUE}", line)
            if at is not None:
                found[name] = number_of_text(at["value"], at["unit"])
        count = found.pop(self._step, None) if self._step is not None else find_step(line, self._epochs)[1]
        if not found or count is None or count != int(count):
            return None
        return Point(0, int(count), _time(line), {**self._named(fields_in(line, self.names)), **found})

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

    def _parse_plain(self, line: str, plain: str) -> Point | None:
        if "{" in line:
            point = _parse_braces(line, self._counted, self._epochs)
            if point is not None and (point.values or self._counted > 0):
                return point
        if "\t" not in line and EVALUATION.search(line) and not re.search(r"\btrain(?!\w*\.py)", line, re.IGNORECASE):
            return None
        self._inner = self._inner or "| train_inner |" in line
        if self._inner and EPOCH_MEAN.search(line):
            return None
        if OTHER_LOSS.search(line) and not re.search(r"\bepoch\b", line, re.IGNORECASE):
            return None
        counter, found = find_step(line, self._epochs)
        counted = found is not None
        if found is None and (leads := LEADS.match(plain)) is not None:
            found = self._epochs.plain(whole(leads["at"]))
        values = fields_in(line, self.names)
        loss = next((name for name in values if role_of(name) is Role.LOSS), None)
        told = loss is not None or any(role_of(name) is Role.SOURCE for name in values)
        if counted:
            found = self._by_one_counter(counter, found, told=told)
        if counted and told:
            self._finer, self._since = self._finer + 1, self._since + 1
        elif found is None and (epoch := EPOCH.search(line)) is not None:
            if self._finer and (self._since or not told):  # the mean of an epoch whose steps are printed
                self._since = 0 if told else self._since
                return None
            found = self._epochs.plain(whole(epoch["at"]))
        blank = loss is None and self._loss is not None and BLANK.search(line) is not None
        if blank:
            values = fields_in(BLANK.sub(" ", line), self.names)
        if found is None:
            return self._loss if self._loss is not None and SAID.search(line) else self._below(values)
        if not blank and not _tells(values):
            self._announce(line)
            return None
        self._announced = None
        named = self._named(values)
        if loss is not None:
            self._loss = Point(0, found, None, dict.fromkeys(self._named({loss: 0.0}), math.nan))
        return Point(0, found, _time(line), named)

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
            self._announced, self._told, self._held = epoch, set(), {}
        return first

    def _take_first_epoch(self) -> Point | None:
        """The record of the first epoch, which was kept back; None where lines with a counter came after it."""
        first, self._first_epoch = self._first_epoch, None
        return None if self._finer else first

    def _announce(self, line: str) -> None:
        """Remember the step of a line that holds nothing else, as a header does: values may stand in the lines below it."""
        found = None if EVALUATION.search(line) else ANNOUNCED.search(line)
        if found is not None:
            self._announced, self._told, self._held = whole(found["at"]), set(), None

    def _below(self, values: Mapping[str, float]) -> Point | None:
        """The part of a point that stands in a line without a step, below the line that named it; each name once."""
        if self._announced is None or not values.keys() or values.keys() & self._told:
            if values.keys() & self._told:
                self._announced = None  # these lines do not belong to that one
                if self._held is not None and not self._lines_of_epochs:
                    self._lines_of_epochs, self._first_epoch = False, None  # several in an epoch, and none is counted
            return None
        self._told |= values.keys()
        if self._held is not None:  # an epoch's LR may stand above its loss
            self._held |= values
            if not _is_judged(self._held):
                return None
            values, self._held = self._held, {}
            if not self._lines_of_epochs:
                known = self._first_epoch.values if self._first_epoch is not None else {}
                self._first_epoch = Point(0, self._announced, None, {**known, **self._named(values)})
                return None
        return Point(0, self._announced, None, self._named(values)) if _tells(values) else None

    def _named(self, values: Mapping[str, float]) -> dict[str, float]:
        """Give each name one channel: `lm loss` is `loss`, unless another name of this log is."""
        named: dict[str, float] = {}
        for tag, value in values.items():
            channel = canonical_name(tag)
            owner = self._owners.setdefault(channel, tag)
            named[channel if owner == tag else tag if self._owners.setdefault(tag, tag) == tag else f"{tag} (2)"] = value
        return named

    def _is_other_rank(self, line: str) -> bool:
        """Whether another rank than the first one seen printed this line."""
        found = RANK.search(line)
        if found is None:
            return False
        rank = next(part for part in found.groups() if part is not None)
        if self._rank is None and find_step(line, EpochSteps())[1] is not None:
            self._rank = rank if _tells(fields_in(line)) else None
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
    text = line[start : end + 1]
    record: Any = None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        try:
            record = ast.literal_eval(text.replace(": nan", ": 'nan'").replace(": inf", ": 'inf'"))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    if not isinstance(record, dict):
        return None
    if "event_type" in record and "key" in record:
        return _parse_mlperf(record)
    if ":::MLP" in line and (key := KEY_BEFORE.search(line[:start])) is not None:  # the form of before v0.6
        return _parse_mlperf({"key": key[1], "value": record.get("value"), "metadata": record})
    before = STEP_BEFORE.search(line[:start])
    counted = counted if before is None else whole(before[1])
    point = point_of_record(record, epochs, counted=counted, texts=True)
    if point is None or (point.values and not _tells(point.values)) or "train_runtime" in record:
        return None
    if point.counted and before is None and point.values and not _is_judged(dict.fromkeys(map(str, record), 0.0)):
        return None  # a setting: a line without a step makes one only where it holds a loss
    named = {canonical_name(name): value for name, value in point.values.items()}
    return point._replace(time=_time(line), values=named, counted=point.counted and before is None)


def _parse_mlperf(record: Mapping[str, Any]) -> Point | None:
    meta = record.get("metadata") or {}
    found = next((meta[name] for name in ("step", "step_num", "iteration", "samples_count", "epoch_num") if name in meta), None)
    value = record.get("value")
    fields = value if isinstance(value, dict) else {str(record["key"]): value}
    values = {}
    for name, cell in {**fields, **meta}.items():
        number = number_in(cell)
        if number is not None and role_of(str(name)) is not Role.IGNORED:
            values[str(name)] = float(number)
    if not isinstance(found, int | float) or not _tells(values):
        return None
    stamp = record.get("time_ms")
    return Point(0, int(found), stamp / 1000 if isinstance(stamp, int | float) else None, values)


def _time(line: str) -> float | None:
    """Return the time stamp of a line in seconds since the epoch, read as UTC; only differences are used."""
    stamp = STAMP.search(line)
    if stamp is None:
        return None
    try:
        moment = datetime.datetime.fromisoformat(f"{stamp[1]}T{stamp[2]}+00:00")
    except ValueError:
        return None
    return moment.timestamp()
