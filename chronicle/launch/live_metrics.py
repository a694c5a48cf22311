"""Metrics from printed lines, and the ends of a launch's per-step log.

    lines of the log -> `metrics.lines` dialects -> held for ten seconds -> metrics.jsonl

A trainer's own `metrics.jsonl` takes precedence: once one exists, printed lines are no longer parsed.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from chronicle.launch.output import read_tail
from chronicle.metrics.lines import PrintedLines
from chronicle.metrics.log import MetricsWriter, Point, parse_line, read_metrics

HOLD_SECONDS = 10.0
REPEATS = 50  # this many old steps in a row are a restarted counter, not a slow rank


class Place(NamedTuple):
    """A place in the log of a launch: its part, and bytes from the part's beginning."""

    part: int = 0
    offset: int = 0


class _Step(NamedTuple):
    step: int
    time: float
    values: Mapping[str, float]
    attempt: int = 0


class _Read(NamedTuple):
    """How far the lines before a place in the log had come."""

    attempt: int
    last: int
    place: Place


@dataclass
class PrintedMetrics:
    """Turns printed lines into `metrics.jsonl`. Call `write_due` once a second and `finish` after the last line.

    Points are held back for ten seconds, so that the trainer's own file can appear first. A line without a step is ignored.
    Steps only grow within an attempt of a launch: a line repeated by another rank is dropped (a bar that moves shows the step
    before at first: its last line counts), and when the step counter restarts (once an epoch) parsing stops with a message.
    `newer_attempt(n)` is asked when a printed step is no new one: which start of the ranks after the n-th has begun.
    """

    path: Path
    _: KW_ONLY
    say: Callable[[str], None]
    clock: Callable[[], float] = time.time
    newer_attempt: Callable[[int], int] = lambda number: number
    seen: int = 0  # points that were printed, repeated steps too; any output once parsing has stopped: signs of progress
    _attempt: int = 0  # of the ranks that print
    _last: int = -1
    _repeats: int = 0
    _marked: int = 0  # the attempt whose mark was written last
    _written: tuple[int, int] = (0, -1)  # attempt and step of the last point in the file
    _read: deque[_Read] = field(default_factory=deque)  # places whose points are not in the file yet, after the newest that is
    _reader: PrintedLines = field(default_factory=lambda: PrintedLines(counted=-1))
    _held: list[_Step] = field(default_factory=list)
    _open: _Step | None = None  # several lines about one step are merged into one point
    _writer: MetricsWriter | None = None
    _size: int | None = None  # size of the file after our last write; None: no file yet
    _deaf: bool = False  # parsing has stopped; parsed points are still written
    _off: bool = False  # writing has stopped too

    @property
    def writing(self) -> bool:
        """Return whether metrics of this launch come from printed lines."""
        return self._writer is not None

    def take(self, lines: Iterable[bytes], place: Place) -> None:
        """Take whole lines; the log goes on behind them at `place`."""
        if self._deaf:
            self.seen += 1
        for line in lines:
            if not self._deaf:
                self._take_line(line)
        self._read.append(_Read(self._attempt, self._last, place))

    def write_due(self) -> None:
        """Write points that were held long enough, unless the trainer has its own file."""
        if self._off or not self._held:
            return
        if self._writer is not None or self.clock() - self._held[0].time >= HOLD_SECONDS:
            self._write()

    def finish(self) -> None:
        """Write the remaining points and close the file."""
        self._hold_open()
        if self._held and not self._off:
            self._write()
        self._stop()

    # ---- for the one that goes on after this process has died

    def state(self) -> dict[str, Any]:
        """Where another one goes on: behind the newest place all of whose points are in the file."""
        while len(self._read) > 1 and (self._deaf or (self._read[1].attempt, self._read[1].last) <= self._written):
            self._read.popleft()
        first = self._read[0] if self._read else _Read(0, -1, Place())
        is_known = self._deaf or (first.attempt, first.last) <= self._written
        attempt, last, place = first if is_known else _Read(0, -1, Place())
        return {
            "attempt": attempt, "last": last, "place": place, "written": self._written, "marked": self._marked,
            "writing": self.writing, "deaf": self._deaf, "off": self._off,
        }  # fmt: skip

    def go_on(self, state: Mapping[str, Any]) -> Place:
        """Go on from what `state` told; the place in the log."""
        self._attempt, self._last = state["attempt"], state["last"]
        self._written, self._marked = tuple(state["written"]), state["marked"]
        self._deaf, self._off = state["deaf"], state["off"]
        if state["writing"] and not self._off:
            self._writer = MetricsWriter(self.path, clock=self.clock, attempt=0)
            self._size = os.stat(self.path).st_size
        place = Place(*state["place"])
        self._read.append(_Read(self._attempt, self._last, place))
        return place

    # ---- lines

    def _take_line(self, line: bytes) -> None:
        point = self._parse(line)
        if point is None or point.step < 0:
            return
        self.seen += 1
        if point.step < self._last:
            number = self.newer_attempt(self._attempt)
            if number > self._attempt:
                self._begin(number)
                point = self._parse(line) or point
        if self._open is not None and point.step == self._open.step:
            over, kept = (self._open.values, point.values) if b"%|" in line else (point.values, self._open.values)
            self._open = self._open._replace(values={**over, **kept})
        elif point.step > self._last:
            self._hold_open()
            self._open = _Step(point.step, self.clock(), point.values, self._attempt)
            self._last, self._repeats = point.step, 0
        else:
            self._repeats += 1
            if self._repeats == REPEATS:
                self._deaf = True
                if not self._has_another_writer():
                    self.say(f"printed steps went back from {self._last} to {point.step}: printed lines are no longer read as "
                              "metrics; print the number of completed optimizer steps")  # fmt: skip

    def _begin(self, number: int) -> None:
        """The launcher has started the ranks again."""
        self._hold_open()
        self._attempt, self._last, self._repeats = number, -1, 0
        self._reader = PrintedLines(counted=-1)

    def _hold_open(self) -> None:
        """The lines about one step are over."""
        if self._open is not None:
            self._held.append(self._open)
        self._open = None

    def _parse(self, line: bytes) -> Point | None:
        return self._reader.parse(line.decode("utf-8", "replace") + "\n")

    # ---- the file

    def _write(self) -> None:
        if self._has_another_writer():
            self._deaf = self._off = True
            self._stop()
            return
        try:
            if self._writer is None:
                self._writer = MetricsWriter(self.path, clock=self.clock, attempt=0)
                self.say("the trainer writes no metrics.jsonl: loss and LR are read from its printed lines")
            for held in self._held:
                self._write_one(self._writer, held)
            self._size = os.stat(self.path).st_size
        except OSError as error:
            self.say(f"cannot write `{self.path}`: {error.strerror or error}; metrics are not recorded")
            self._deaf = self._off = True
        self._held.clear()

    def _write_one(self, writer: MetricsWriter, held: _Step) -> None:
        if (held.attempt, held.step) <= self._written:
            return  # by the one before
        if held.attempt != self._marked:
            self._marked = held.attempt
            writer.begin_attempt(held.attempt, time=held.time)
        writer.write(held.step, held.values, time=held.time)
        self._written = (held.attempt, held.step)

    def _has_another_writer(self) -> bool:
        """Return whether somebody else created or extended the file: the trainer writes its own."""
        try:
            return os.stat(self.path).st_size != self._size
        except OSError:
            return False

    def _stop(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._held.clear()
        self._open = None


# --- The ends of the per-step log

TAIL_BYTES = 1 << 16


def last_point(path: Path) -> Point | None:
    """Return the point of the last complete line of a `metrics.jsonl`; None when there is none."""
    return next(_points_from_the_end(path), None)


def last_steps(path: Path) -> list[int]:
    """The last two steps of a `metrics.jsonl`, in the order of the file; fewer where it has no more."""
    steps = dict.fromkeys(point.step for point in _points_from_the_end(path))
    return list(islice(steps, 2))[::-1]


def _points_from_the_end(path: Path) -> Iterator[Point]:
    lines = read_tail(path, TAIL_BYTES).split(b"\n")[:-1]
    return (point for line in reversed(lines) if (point := parse_line(line)) is not None)


def read_start_step(path: Path) -> int | None:
    """Return the step a launch started from, computed from the first two logged steps; None until both exist.

    A trainer that logs every tenth step writes 10, 20, …: it started at 0, not at 9. One whose first step is 0 started at -1.
    """
    try:
        first, second = (point.step for point in islice(read_metrics(path), 2))
    except (OSError, ValueError):
        return None
    stride = second - first
    return max(first - stride, -1) if stride > 0 and first % stride == 0 else max(first - 1, 0)
