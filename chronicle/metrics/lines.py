"""Text logs: open them (gzip, UTF-16), and parse the lines that trainers print.

One general reader: a line is taken apart into `name: value`, `name=value` and (for names of the table) `name value`; the
table of `rollback.channels` says what each name is, and the step is the counter that the line names (`COUNTERS`). Forms whose
step and values stand in different lines are readers of their own (`forms.py`); blocks below a header, epochs, Keras and
MLPerf's records are here. Each form has a sample in `tests/metrics/dialects.py`, with its source.

Validation losses are no points. Prefixes of time, host and rank, ANSI colours, carriage returns and commas in numbers are
accepted; where several ranks print, the first one counts. A number that touches the end of a cut line is not trusted.
"""

from __future__ import annotations

import ast
import datetime
import gzip
import json
import math
import re
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from chronicle.metrics.forms import FORMS
from chronicle.metrics.log import Point
from chronicle.metrics.numbers import NUMBER, UNITS, number_in, number_of_text
from rollback.channels import (
    EPOCH_NAMES,
    EVAL_WORDS,
    HINTS,
    JUDGED,
    LAUNCH_NAMES,
    STEP_NAMES,
    TELLING,
    TIME_NAMES,
    Role,
    canonical_name,
    printed_names,
    role_of,
)

REPR = r"(?:np\.b?float\d+|(?:tf\.)?tensor|(?:Device)?Array)\("  # what Python prints around the number
VALUE = rf"[\[(]?\s*(?:{REPR})?(?P<value>{NUMBER})(?P<unit>[KMBT](?![A-Za-z]))?(?!\w|\.\w)"
NAMED = re.compile(
    rf"(?<!\w)(?P<name>[A-Za-z_][\w./@()-]*(?: [A-Za-z_(][\w./()-]*){{0,3}})['\"]?\s*[:=]\s*{VALUE}", re.IGNORECASE
)
SPACED = re.compile(
    rf"(?<![\w/])(?P<name>(?:(?:train|training)[ _/])?(?:{printed_names()}))(?![\w/-])\s+(?:is\s+)?{VALUE}", re.IGNORECASE
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
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)")
PREFIX = re.compile(  # time, host and stream that a collector writes before each line
    r"^\[?(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d)\]?[ \t]"
    r"(?:std(?:out|err) [FP] )?(?:(?=[^ \t,;={]*[\d.-])[A-Za-z][\w.-]*:?[ \t](?:[\w./-]+\[\d+\]:[ \t])?)?"
)
RANK_FIRST = re.compile(
    r"^(?:\[default(\d+)\]:?|\(\w+ pid=(\d+)[^)]*\)|\[?rank[ _:=]?(\d+)\]?:?|(?P<first>\d+):(?!\d\d:\d\d)"
    r"|\[\d+,(\d+)\]<std\w+>:?) ?", re.IGNORECASE,
)
OURS = re.compile(r"chronicle(?: guard)?: | {6}(?:expected|found|where|likely): ")  # what chronicle says itself is no metric
RANK = re.compile(r"\[default(\d+)\]|\[?\brank[ _:=]*(\d+)\b\]?|\bDP=(\d+)\|", re.IGNORECASE)

# Counters, the most telling first, each with the number of its first epoch. `at` is the step; with `epoch` and `of` it
# counts within an epoch of that length, with `epoch` alone within one of unknown length.
COUNT = r"(?P<at>\d[\d,]*)(?!\w|\.\w)(?!-\d\d-)"
COUNTERS: tuple[tuple[re.Pattern[str], int, bool], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), first, r"\bepoch" in pattern)  # the last: only where the word is in the line
    for pattern, first in (
        (
            r"(?<![\w/.])(?:(?:train(?:er)?/)?global[_ ]?step|num_updates|total_timesteps|(?:env|policy)_step)\s*[:=]?\s*"
            + COUNT, 0,
        ),
        (rf"\bepoch(?:\(\w+\))?\s*\[(?P<epoch>\d+)(?:/\d+)?\]:?\s*\[\s*{COUNT}\s*/\s*(?P<of>\d+)", 1),
        (rf"\bepoch:?\s*\[(?P<epoch>\d+)/\d+\][:,]?\s*(?:batch|step|iter)s?:?\s*\[?\s*{COUNT}\s*/\s*(?P<of>\d+)", 1),
        (rf"(?:^|\s)\[(?P<epoch>\d+)/\d+\]\s*\[{COUNT}/(?P<of>\d+)\]", 0),
        (rf"\btrain\b.*?\bbatch\s+(?P<epoch>\d+)/{COUNT}\s+loss\b", 0),
        (rf"\bepoch\s+(?P<epoch>\d+)\s*\|.*?\|\s*steps?:\s*{COUNT}", 0),
        (rf"\btrain(?:ing)?:?\s*\[(?P<epoch>\d+)/\d+\]\s*\[\s*{COUNT}\s*/\s*(?P<of>\d+)", 0),
        (rf"\bepoch\s*\[(?P<epoch>\d+)\]\s*,?\s*\[?(?:batch|iter|step)\s*\[?{COUNT}\]", 0),
        (rf"\bepoch:\s*\[(?P<epoch>\d+)(?:/\d+)?\]\s*\[\s*{COUNT}\s*/\s*(?P<of>\d+)", 0),
        (rf"\biter(?:\(\w+\))?\s*\[\s*{COUNT}\s*/\s*\d+", 0),
        (rf"\btrain(?:ing)?(?: epoch)?:?\s*(?P<epoch>\d+)\s*\[\s*{COUNT}\s*/\s*(?P<of>\d+)", 0),
        (rf"\btrain(?:ing)?:?\s*(?P<epoch>\d+)/\d+\s*(?:\(\s*\d+%\)\s*)?\[\s*{COUNT}\s*/\s*(?P<of>\d+)", 1),
        (rf"\bepoch:?\s*(?P<epoch>\d+)\s[^|]*\[(?:iteration|iter|step)\s*{COUNT}\]", 0),  # BigDL names it beside its samples
        (rf"\bepoch:?\s*(?P<epoch>\d+)\s*[|:,]?\s+{COUNT}\s*/\s*(?P<of>\d+)(?!\s*\[)", 1),
        (rf"\bepoch (?P<epoch>\d+)/\d+ [━╸╺ ]+ {COUNT}/(?P<of>\d+) ", 0),  # Lightning's Rich bar
        (rf"\bepoch:?\s*(?P<epoch>\d+)(?:\s*/\s*\d+)?\s*[,;]?\s*iter(?:ation)?:?\s*{COUNT}\s*/\s*(?P<of>\d+)", 1),
        (rf"\bepoch:?\s*(?P<epoch>\d+)\S*\s*:.*?\|\s*{COUNT}\s*/\s*(?P<of>\d+)\s*\[", 0),
        (r"\b(?P<epoch>\d+)epoch:train:\d+-(?P<at>\d+)batch", 0),
        (
            rf"\bepoch:?\s*(?P<epoch>\d+)(?:\s*/\s*\d+)?[]\s,:|;[-]+"
            rf"(?:batch|step|iter|iteration)s?(?:[ _]idx)?\s*[:=]?\s*{COUNT}",
            0,
        ),
        (
            r"(?<![\w/.])(?:iteration|iter|train[_ ]step|completed step|step|batch|update|Up\.|s(?=\s*[:=]))"
            r"['\"]?\s*(?::\s*|=\s*|\s+)?" + COUNT, 0,
        ),
        (rf"\d+%\|.*?\|\s*{COUNT}\s*/\s*\d+\s*\[.*?\bepoch\s*[:=]\s*(?P<epoch>\d+)", 0),
        (rf"\d+%\|.*?\|\s*{COUNT}\s*/\s*\d+\s*\[", 0),
        (rf"(?:^|\s)\[\s*{COUNT}(?:/\d+)?\]\s+(?:\S+ ?[=:]|train\w*\b)", 0),
        (rf"(?:^|\s)steps ?:\s+{COUNT}(?!%)", 0),
        (r"\bProgress on:train (?P<at>\d+)it\b", 0),
        (rf"^{COUNT}\s+(?=train\s)", 0),
    )
)
THROUGH = COUNTERS[0][0]  # the only ones that say that they count through
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
ROUNDED = re.compile(  # LeRobot's `step:2K`, Levanter's `Progress on:train 1.20kit/10.0kit … postfix:loss=2.31`
    r"(?:(?<![\w/.])(?:global_?)?step\s*[:=]\s*|\bProgress on:train )"
    r"(?P<at>\d+(?:\.(?P<places>\d+))?)(?P<unit>[KMB])(?:it\b|(?!\w))", re.IGNORECASE,
)  # fmt: skip
BLOCK = re.compile(
    r"^(?:.*\s)?(?:\[epoch=(?P<epoch>\d+)\])?\[(?:step|batch|iter|iteration|token|sample)\s*=\s*(?P<at>\d[\d,]*)"
    r"(?:/(?:(?P<of>\d+)|[\d,]+|\?+))?(?:\s*,[^\]]*)?\]\s*:?\s*(?:\{\s*)?$",
    re.IGNORECASE,
)
STEP_BEFORE = re.compile(r"(?:\b|_)(?:step|batch|iter|iteration)\s*[=:#]?\s*(\d[\d,]*)", re.IGNORECASE)
KEY_BEFORE = re.compile(r"(\w+):\s*$")
EPOCH_MEAN = re.compile(r"\| train \| epoch \d+ \|")  # fairseq: where single steps are printed too, no point of its own
KERAS_EPOCH = re.compile(r"^Epoch (\d+)/\d+\s*$")
KERAS_BAR = re.compile(r"^\s*\d+/(?:\d+|Unknown)\s")
KERAS_END = re.compile(r"^\s*(\d+)/\1 .*?- loss: |^\s*(\d+)/\2 .*?\d+\S*/step - ")
COLUMN = re.compile(rf"^(?P<at>\d+)\s+(?P<name>train)\s+(?P<value>{NUMBER})\s*$")
SHARE_OF = re.compile(r"^(\d+)/\d+$")  # a step of all
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
        self._block: int | None = None  # the step of the header whose block is open
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
        self._keras, self._inner = 0, False
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
        cut = not line.endswith(("\n", "\r"))
        if "\x1b" in line:
            line = ANSI.sub("", line)
        line = line.rstrip("\r\n")
        if OURS.match(line) is not None:
            return None
        ranked = RANK_FIRST.match(line)
        if ranked is not None:
            rest = line[ranked.end() :] + "\n" * (not cut)
            found = self._parse_ranked(next(part for part in ranked.groups() if part), rest)
            if found is not None or self._heard is not None or not ranked["first"] or not self._is_count(int(ranked["first"])):
                return found
        line = line.replace("'s ", "-")  # LightGBM: "training's binary_logloss"
        if "loss " in line or "loss," in line:
            line = NUMBER_FIRST.sub(r"\2: \1", COUNT_WITHIN.sub(r"step \1 loss ", line))
        whole, line = line, PREFIX.sub("", line, count=1) if line[:1] in "0123456789[ADFJMNOS" else line
        if self._named_by:
            asked = self._parse_asked(line, cut=cut)
            if asked is not None:
                return asked
        for form in () if cut else self._forms:
            known = form.feed(line)
            if known is not None:
                return Point(0, known.step, _time(line), self._named(known.values)) if _tells(known.values) else None
        if self._block is not None:
            values = self._fields(line, cut=cut) if line[:1] in " \t" else {}
            if values or (line.strip() in ("{", "}") or (line[:1] in " \t" and line.strip())):
                return Point(0, self._block, None, self._named(values)) if _tells(values) else None
            self._block = None
        header = BLOCK.match(line)
        if header is not None:
            self._block = self._step_of(header)
            return None
        begins = EPOCH_LINE.search(line)
        if begins is not None and OTHER_EPOCH.search(line) is None:
            if KERAS_EPOCH.match(line):
                self._keras = int(begins["at"])
            return self._begin_epoch(int(begins["at"]))
        plain, line = line, whole
        if not any(hint in line for hint in HINTS):
            column = None if cut else COLUMN.match(plain)
            if column is None:
                self._announce(plain)
            return None if column is None else Point(0, int(column["at"]), None, {"loss": float(column["value"])})
        if self._is_other_rank(line):
            return None
        if self._keras and KERAS_END.match(plain):
            values = self._fields(line, cut=cut)
            return Point(0, self._keras, None, self._named(values)) if _tells(values) else None
        if self._keras and KERAS_BAR.match(plain):
            return None
        return self._parse_plain(line, plain, cut=cut)

    def _is_count(self, number: int) -> bool:
        """Whether the number that lines begin with, and no rank was told by, counts: it rises from line to line."""
        rises, self._first = number > self._first, max(number, self._first)
        self._falls = self._falls or not rises
        return not self._falls

    def _step_of(self, header: re.Match[str]) -> int:
        """The step of a block's header: `[step=12/90]`, or within an epoch `[epoch=2][batch=3/90]`."""
        at = _whole(header["at"])
        if header["epoch"] is None:
            return at
        if header["of"] is not None:
            return max(0, int(header["epoch"]) - 1) * int(header["of"]) + at
        return self._epochs.step(float(header["epoch"]), at)

    def _parse_asked(self, line: str, *, cut: bool) -> Point | None:
        """Read the names that a person gave (`name: value`, `name=value`, `name value`) and what else is known."""
        found = {}
        for name in self._named_by:
            at = re.search(rf"(?<![\w./]){re.escape(name)}\s*[:=]?\s*{VALUE}", line)
            if at is not None and not (cut and at.end() == len(line)):
                found[name] = number_of_text(at["value"], at["unit"])
        count = found.pop(self._step, None) if self._step is not None else _find_step(line, self._epochs, cut=cut)[1]
        if not found or count is None or count != int(count):
            return None
        return Point(0, int(count), _time(line), {**self._named(self._fields(line, cut=cut)), **found})

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

    def _parse_plain(self, line: str, plain: str, *, cut: bool) -> Point | None:
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
        counter, found = _find_step(line, self._epochs, cut=cut)
        counted = found is not None
        if found is None and (leads := LEADS.match(plain)) is not None:
            found = self._epochs.plain(_whole(leads["at"]))
        values = self._fields(line, cut=cut)
        loss = next((name for name in values if role_of(name) is Role.LOSS), None)
        told = loss is not None or any(role_of(name) is Role.SOURCE for name in values)
        if counted:
            found = self._by_one_counter(counter, found, told=told)
        if counted and told:
            self._finer, self._since = self._finer + 1, self._since + 1
        elif found is None and (epoch := EPOCH.search(line)) is not None and not (cut and epoch.end("at") == len(line)):
            if self._finer and (self._since or not told):  # the mean of an epoch whose steps are printed
                self._since = 0 if told else self._since
                return None
            found = self._epochs.plain(_whole(epoch["at"]))
        blank = loss is None and self._loss is not None and not cut and BLANK.search(line) is not None
        if blank:
            values = self._fields(BLANK.sub(" ", line), cut=cut)
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
            self._announced, self._told, self._held = _whole(found["at"]), set(), None

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

    def _fields(self, line: str, *, cut: bool) -> dict[str, float]:
        values: dict[str, float] = {}
        end = len(line) if cut else -1
        for field in _fields_of(line):
            if field.end("value") == end:
                continue  # the number may go on behind the cut
            name = _known_part(field["name"])
            if len(self.names) < 40:
                self.names.setdefault(field["name"])
            if name is not None and name not in values:
                values[name] = number_of_text(field["value"], field["unit"])
        return values

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
        if self._rank is None and _find_step(line, EpochSteps(), cut=False)[1] is not None:
            self._rank = rank if _tells(self._fields(line, cut=False)) else None
        return self._rank is not None and rank != self._rank


def _find_step(line: str, epochs: EpochSteps, *, cut: bool) -> tuple[int | None, int | None]:
    """Which counter the line names (its place among COUNTERS; None of a rounded one), and the step, if any."""
    rounded = ROUNDED.search(line)
    if rounded is not None:
        unit = UNITS[rounded["unit"].upper()]
        places = len(rounded["places"] or "")
        return None, epochs.rounded(float(rounded["at"]) * unit, unit / 10**places, line)
    has_epoch = "epoch" in line.lower()
    for place, (pattern, first, needs_epoch) in enumerate(COUNTERS):
        if needs_epoch and not has_epoch:
            continue
        found = pattern.search(line)
        if found is None or (cut and found.end("at") == len(line)):
            continue
        at = _whole(found["at"])
        groups = found.groupdict()
        if groups.get("of"):
            return place, epochs.of(int(groups["epoch"]), at, int(groups["of"]), first)
        if groups.get("epoch"):
            return place, epochs.step(float(groups["epoch"]), at)
        if epochs.open is None or pattern is THROUGH:
            return place, epochs.plain(at)
        return place, epochs.step(epochs.open, epochs.plain(at))
    return None, None


def _fields_of(line: str) -> Iterator[re.Match[str]]:
    """Yield `name: value` and `name=value`, then `name value` of the table's names outside of those."""
    taken: list[tuple[int, int]] = []
    for field in NAMED.finditer(line):
        taken.append(field.span())
        yield field
    for field in SPACED.finditer(line):
        if not any(begin <= field.start("value") < end for begin, end in taken):
            yield field


@lru_cache(maxsize=4096)
def _known_part(phrase: str) -> str | None:
    """Return the longest end of a phrase that is a known name: `INFO loss` is `loss`; None for what is not known."""
    words = re.split(r"\. ", phrase)[-1].strip("()").split(" ")
    if re.fullmatch(rf"(?!values?$)(?:{EVAL_WORDS})\w*|std(?:dev)?|time", words[0], re.IGNORECASE):
        return None
    for start in range(len(words)):
        name = " ".join(words[start:])
        if role_of(name) is not Role.IGNORED and not (start and name.lower() == "norm"):  # `params norm` is another one
            return name
    return None


def _is_same(value: float, known: float) -> bool:
    """Whether a number of a step is the one that is known of it, printed with as many or with fewer digits."""
    return value == known or abs(value - known) <= SAME * abs(known)


def _tells(values: Mapping[str, float]) -> bool:
    return any(role_of(name) in TELLING for name in values)


def _is_judged(values: Mapping[str, float]) -> bool:
    return any(role_of(name) in JUDGED for name in values)


def _whole(text: str) -> int:
    return int(text.replace(",", ""))


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
    counted = counted if before is None else _whole(before[1])
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


# --- Records of other writers


class EpochSteps:
    """Make one count of steps that begin again with each epoch and whose number in an epoch is not printed.

    Or of steps that are printed in thousands (`step:2K`, LeRobot): by the interval before, as long as it rounds to them.
    """

    def __init__(self) -> None:
        self.epoch: float | None = None
        self.last = self.offset = 0
        self.begins: dict[int, int] = {}  # the offset of each epoch
        self.shown = self.gap = 0  # of steps that count through
        self.line = ""
        self.open: float | None = None  # the epoch that a line of its own has named
        self.seen: tuple[int, int, int] = (-1, 0, 0)  # with a length: the epoch, its last step, its lines
        self.first = 1  # the lowest epoch
        self.through = False  # the length is that of the run: `epoch: 4, iter: 1010/80000`

    def plain(self, at: int) -> int:
        """Return a step that counts through."""
        if at != self.shown:
            self.gap, self.shown = max(0, at - self.shown), at
        return at

    def rounded(self, shown: float, unit: float, line: str) -> int:
        """Return the step of a line that rounds it to `unit`: the one before and the interval, as long as that rounds to it."""
        if line != self.line:
            self.line, next_one = line, self.shown + self.gap
            self.shown = next_one if abs(next_one - shown) <= 0.5 * unit else int(shown)
        return self.shown

    def of(self, epoch: int, at: int, length: int, first: int) -> int:
        """Return the step of one printed with a length: the epoch's, or the run's where it goes on in the next epoch."""
        known, last, lines = self.seen
        self.through = self.through or (epoch > known and lines > 1 and at > last)
        self.seen = (epoch, at, lines + (at != last) if epoch == known else 1)
        self.first = min(self.first, epoch)  # some count their epochs from 0, whatever others do with this form
        return at if self.through else max(0, epoch - min(first, self.first)) * length + at

    def step(self, epoch: float, at: int) -> int:
        """Return the step since the log began."""
        if self.epoch is not None and epoch > self.epoch and at <= self.last:
            self.offset += self.last
        elif self.epoch is not None and epoch < self.epoch:  # another launch, or another run
            self.offset = self.begins.get(int(epoch), 0)
        self.begins.setdefault(int(epoch), self.offset)
        self.epoch, self.last = epoch, at
        return self.offset + at


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


SUMMARY_WORDS = {"mean", "std", "num", "count", "min", "max", "median", "sum"}


def _is_measured(name: str) -> bool:
    """Whether a text under this name may be a number: a counter, or a channel of a known role."""
    return name.lower() in STEP_NAMES or role_of(name) is not Role.IGNORED


# --- Opening a log as text

SNIFF_BYTES = 1 << 16
GZIP_MARK = b"\x1f\x8b"
UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def is_gzip(path: Path) -> bool:
    """Whether a file is compressed with gzip, by its first bytes."""
    with open(path, "rb") as log:
        return log.read(2) == GZIP_MARK


def read_head(path: Path) -> bytes:
    """Return the first bytes of a log, decompressed; of a truncated gzip what it still holds."""
    if not is_gzip(path):
        with open(path, "rb") as log:
            return log.read(SNIFF_BYTES)
    with open(path, "rb") as packed:
        try:
            return zlib.decompressobj(wbits=31).decompress(packed.read(SNIFF_BYTES), SNIFF_BYTES)
        except zlib.error:
            return b""


def encoding_of(head: bytes) -> str:
    """How the text of a log is encoded, by its first bytes."""
    return "utf-16" if head.startswith(UTF_16_MARKS) else "utf-8"


def log_lines(path: Path, *, newline: str | None = None) -> Iterator[str]:
    """Yield the lines of a log as text; a truncated gzip ends where it is cut. Raises OSError when it cannot be read.

    Encodings are UTF-8 and the UTF-16 of a Windows shell; other bytes become replacement characters.
    """
    encoding = encoding_of(read_head(path))
    if not is_gzip(path):
        with open(path, encoding=encoding, errors="replace", newline=newline) as log:
            yield from log
        return
    with gzip.open(path, "rt", encoding=encoding, errors="replace", newline=newline) as packed:
        try:
            yield from packed
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return
