"""Which step a printed line or a record names: its counters, the most telling first, and one count over epochs."""

from __future__ import annotations

import re
from typing import NamedTuple

from chronicle.metrics.numbers import UNITS

# Each with the number of its first epoch. `at` is the step; with `epoch` and `of` it
# counts within an epoch of that length, with `epoch` alone within one of unknown length.
COUNT = r"(?P<at>\d[\d,]*)(?!\w|\.\w)(?!-\d\d-)"
COUNTERS: tuple[tuple[re.Pattern[str], int, bool], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), first, r"\bepoch" in pattern)  # the last: only where the word is in the line
    for pattern, first in (
        (
            r"(?<![\w/.])(?:(?:train(?:er)?/)?global[_ ]?step|num_updates|total_timesteps|(?:env|policy)_step)\s*[:=]?\s*"
            + COUNT, 0,
        ),
        (rf"\[epoch=(?P<epoch>\d+)\]\[(?:batch|iter|iteration)={COUNT}(?:/(?P<of>\d+))?", 1),  # Composer
        (rf"\[(?:token|sample)={COUNT}", 0),
        (rf"\bepoch(?:\(\w+\))?\s*\[(?P<epoch>\d+)(?:/\d+)?\]:?\s*\[\s*{COUNT}\s*/\s*(?P<of>\d+)", 1),
        (rf"\bepoch:?\s*\[(?P<epoch>\d+)/\d+\][:,]?\s*(?:batch|step|iter)s?:?\s*\[?\s*{COUNT}\s*/\s*(?P<of>\d+)", 1),
        (rf"(?:^|\s)\[(?P<epoch>\d+)/\d+\]\s*\[{COUNT}/(?P<of>\d+)\]", 0),
        (rf"\btrain\b.*?\bbatch\s+(?P<epoch>\d+)/{COUNT}\s+loss\b", 0),
        (rf"\bepoch\s+(?P<epoch>\d+)\s*\|.*?\|\s*steps?:\s*{COUNT}", 0),
        (rf"\btrain(?:ing)?:?\s*\[(?P<epoch>\d+)/\d+\]\s*\[\s*{COUNT}\s*/\s*(?P<of>\d+)", 0),
        (rf"\bepoch\s*\[(?P<epoch>\d+)\]\s*,?\s*\[?(?:batch|iter|step)\s*\[?{COUNT}\]", 0),
        (rf"\bepoch:\s*\[(?P<epoch>\d+)(?:/\d+)?\]\s*\[\s*{COUNT}\s*/\s*(?P<of>\d+)", 0),
        (rf"\biter(?:\(\w+\))?\s*\[\s*{COUNT}\s*/\s*\d+", 0),
        (rf"\btrain(?:ing)?:?\s*(?P<epoch>\d+)\s*\[\s*{COUNT}\s*/\s*(?P<of>\d+)", 0),
        (rf"\btrain(?:ing)? epoch:?\s*(?P<epoch>\d+)\s*\[\s*{COUNT}\s*/\s*(?P<of>\d+)", 1),
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
            r"(?<![\w/.])(?:iteration|iter|train[_ ]step|completed step|step|batch|update|Up\.|s(?=\s*[:=])"
            r"|loss(?= \d+ [-+]?(?:\d+\.\d|nan|inf)))"
            r"['\"]?\s*(?::\s*|=\s*|\s+)?" + COUNT, 0,
        ),
        (rf"\d+%\|.*?\|\s*{COUNT}\s*/\s*\d+\s*\[.*?\bepoch\s*[:=]\s*(?P<epoch>\d+)", 0),
        (rf"\d+%\|.*?\|\s*{COUNT}\s*/\s*\d+\s*\[", 0),
        (rf"(?:^|\s)\[\s*{COUNT}(?:/\d+)?\]\s+(?:\S+ ?[=:]|train\w*\b)", 0),
        (rf"(?:^|\s)\[\s*{COUNT}/\d+\]\s+loss\b", 0),
        (rf"(?:^|\s)steps ?:\s+{COUNT}(?!%)", 0),
        (r"\bProgress on:train (?P<at>\d+)it\b", 0),
        (rf"^{COUNT}\s+(?=train\s)", 0),
    )
)
THROUGH = 0  # the place of the only ones that say that they count through
ROUNDED = re.compile(  # LeRobot's `step:2K`, Levanter's `Progress on:train 1.20kit/10.0kit … postfix:loss=2.31`
    r"(?:(?<![\w/.])(?:global_?)?step\s*[:=]\s*|\bProgress on:train )"
    r"(?P<at>\d+(?:\.(?P<places>\d+))?)(?P<unit>[KMB])(?:it\b|(?!\w))", re.IGNORECASE,
)  # fmt: skip


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


class Counter(NamedTuple):
    """Which counter a line names (its place among COUNTERS; None of a step that is rounded), and where its numbers stand."""

    place: int | None
    at: slice
    epoch: slice | None = None
    of: slice | None = None
    unit: float = 1.0  # of a step that is printed in thousands or millions
    exact_to: float = 1.0

    def step_in(self, line: str, epochs: EpochSteps) -> int:
        """The step of this line, or of another one of the same shape."""
        if self.place is None:
            return epochs.rounded(float(line[self.at]) * self.unit, self.exact_to, line)
        at = whole(line[self.at])
        if self.epoch is not None:
            epoch = int(line[self.epoch])
            if self.of is None:
                return epochs.step(epoch, at)
            return epochs.of(epoch, at, int(line[self.of]), COUNTERS[self.place][1])
        if epochs.open is None or self.place == THROUGH:
            return epochs.plain(at)
        return epochs.step(epochs.open, epochs.plain(at))


def find_counter(line: str) -> Counter | None:
    """The most telling counter that a line names; a rounded one only where no other can be more exact."""
    rounded = ROUNDED.search(line)
    if rounded is not None:
        unit = UNITS[rounded["unit"].upper()]
        return Counter(None, slice(*rounded.span("at")), unit=unit, exact_to=unit / 10 ** len(rounded["places"] or ""))
    has_epoch = "epoch" in line.lower()
    for place, (pattern, _, needs_epoch) in enumerate(COUNTERS):
        found = pattern.search(line) if has_epoch or not needs_epoch else None
        if found is not None:
            spans = {name: slice(*found.span(name)) for name, text in found.groupdict().items() if text}
            return Counter(place, spans["at"], spans.get("epoch"), spans.get("of"))
    return None


def whole(text: str) -> int:
    """Return a count that may hold commas."""
    return int(text.replace(",", ""))
