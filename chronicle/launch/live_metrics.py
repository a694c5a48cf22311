"""Metrics of a running launch: parsed from printed lines where the trainer writes none, and polled by the live detector.

    bytes of the pipes -> whole lines -> `metrics.lines` dialects -> held for ten seconds -> metrics.jsonl

A trainer's own `metrics.jsonl` takes precedence: once one exists, printed lines are no longer parsed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

from chronicle.launch.output import split_lines
from chronicle.metrics.lines import parse_log_line
from chronicle.metrics.log import MetricsWriter, Point, parse_line, read_metrics
from rollback.channels import HINTS

__all__ = [
    "LiveDetector",
    "PrintedMetrics",
    "Watcher",
    "last_point",
    "read_start_step",
    "tier_of",
]

HOLD_SECONDS = 10.0
REPEATS = 50  # this many old steps in a row are a restarted counter, not a slow rank
MARKS = tuple(hint.encode() for hint in HINTS)


class _Step(NamedTuple):
    step: int
    time: float
    values: Mapping[str, float]


class PrintedMetrics:
    """Turns printed lines into `metrics.jsonl`. Call `write_due` once a second and `finish` after the last output.

    Lines are held back for ten seconds, so that the trainer's own file can appear first. A line without a step is ignored.
    Steps only grow within a launch: a line repeated by another rank is dropped, and when the step counter restarts
    (once an epoch) parsing stops with a message.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float],
        say: Callable[[str], None],
        complain: Callable[[str], None],
    ) -> None:
        self._path = path
        self._clock = clock
        self._say = say
        self._complain = complain
        self._rest: dict[int, bytes] = {}
        self._held: list[_Step] = []
        self._open: _Step | None = None  # several lines about one step are merged into one point
        self._last = -1
        self._repeats = 0
        self._writer: MetricsWriter | None = None
        self._size: int | None = None  # size of the file after our last write; None: no file yet
        self._deaf = False  # parsing has stopped; parsed points are still written
        self._off = False  # writing has stopped too

    @property
    def writing(self) -> bool:
        """Return whether metrics of this launch come from printed lines."""
        return self._writer is not None

    def take(self, source: int, data: bytes) -> None:
        """Parse bytes from one pipe or rank; `source` identifies it."""
        if self._deaf:
            return
        lines, self._rest[source] = split_lines(self._rest.get(source, b""), data)
        for line in lines:
            if any(mark in line for mark in MARKS):
                self._take_line(line)

    def write_due(self) -> None:
        """Write points that were held long enough, unless the trainer has its own file."""
        if self._off or not self._held:
            return
        if self._writer is not None or self._clock() - self._held[0].time >= HOLD_SECONDS:
            self._write()

    def finish(self) -> None:
        """Write the remaining points and close the file."""
        for source in list(self._rest):
            self.take(source, b"\n")
        if self._open is not None:
            self._held.append(self._open)
            self._open = None
        if self._held and not self._off:
            self._write()
        self._stop()

    def _take_line(self, line: bytes) -> None:
        point = parse_log_line(line.decode("utf-8", "replace"), -1)
        if point is None or point.step < 0:
            return
        if self._open is not None and point.step == self._open.step:
            new = {name: value for name, value in point.values.items() if name not in self._open.values}
            self._open = self._open._replace(values={**self._open.values, **new})
        elif point.step > self._last:
            if self._open is not None:
                self._held.append(self._open)
            self._open = _Step(point.step, self._clock(), point.values)
            self._last, self._repeats = point.step, 0
        else:
            self._repeats += 1
            if self._repeats == REPEATS:
                self._deaf = True
                if not self._has_another_writer():
                    self._say(f"printed steps went back from {self._last} to {point.step}: printed lines are no longer read as "
                              "metrics; print the number of completed optimizer steps")  # fmt: skip

    def _write(self) -> None:
        if self._has_another_writer():
            self._deaf = self._off = True
            self._stop()
            return
        try:
            if self._writer is None:
                self._writer = MetricsWriter(self._path, clock=self._clock)
                self._say("the trainer writes no metrics.jsonl: loss and LR are read from its printed lines")
            for held in self._held:
                self._writer.write(held.step, held.values, time=held.time)
            self._size = os.stat(self._path).st_size
        except OSError as error:
            self._complain(f"cannot write `{self._path}`: {error.strerror or error}; metrics are not recorded")
            self._deaf = self._off = True
        self._held.clear()

    def _has_another_writer(self) -> bool:
        """Return whether somebody else created or extended the file: the trainer writes its own."""
        try:
            return os.stat(self._path).st_size != self._size
        except OSError:
            return False

    def _stop(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._held.clear()
        self._rest.clear()
        self._open = None


# --- The live detector, and the ends of the per-step log

TAIL_BYTES = 1 << 16


class LiveDetector(Protocol):
    """The part of `chronicle.watch.LiveWatch` used here. Each event has a `tier`."""

    def poll(self) -> Iterable[object]:
        """Return events opened or changed since the last call."""

    def finish(self) -> Iterable[object]:
        """Return the events of the rest of the log, after the launch has ended."""


class Watcher:
    """Polls the live detector. `look()` returns True once: when an event of the propose tier (`event`) stops the launch."""

    def __init__(
        self, live: LiveDetector | None, *, stop_on_proposal: bool, complain: Callable[[str], None]
    ) -> None:
        self._live = live
        self._stop = stop_on_proposal
        self._complain = complain
        self.event: object | None = None

    def look(self) -> bool:
        """Poll the detector. An exception in it is reported once and disables it."""
        if self._live is None:
            return False
        return self._judge(self._ask(self._live.poll))

    def finish(self) -> None:
        """Let the detector read the rest of the log."""
        if self._live is not None:
            self._judge(self._ask(self._live.finish))

    def _ask(self, question: Callable[[], Iterable[object]]) -> list[object]:
        try:
            return list(question())
        except Exception as error:  # noqa: BLE001 a defect in the detector must not end the run
            self._complain(f"the live detector failed and is disabled: {type(error).__name__}: {error}")
            self._live = None
            return []

    def _judge(self, events: Iterable[object]) -> bool:
        proposing = [event for event in events if tier_of(event) == "propose"]
        if not proposing or not self._stop or self.event is not None:
            return False
        self.event = proposing[0]
        return True


def tier_of(event: object) -> str:
    """Return the tier as a word, whether it is an enum member or text."""
    tier = getattr(event, "tier", "")
    return str(getattr(tier, "value", tier)).lower()


def last_point(path: Path) -> Point | None:
    """Return the point of the last complete line of a `metrics.jsonl`; None when there is none."""
    try:
        with open(path, "rb") as metrics:
            metrics.seek(0, 2)
            metrics.seek(max(0, metrics.tell() - TAIL_BYTES))
            lines = metrics.read().split(b"\n")[:-1]
    except OSError:
        return None
    points = (parse_line(line) for line in reversed(lines))
    return next((point for point in points if point is not None), None)


def read_start_step(path: Path) -> int | None:
    """Return the step a launch started from, computed from the first two logged steps; None until both exist.

    A trainer that logs every tenth step writes 10, 20, …: it started at 0, not at 9.
    """
    try:
        first, second = (point.step for point in islice(read_metrics(path), 2))
    except (OSError, ValueError):
        return None
    stride = second - first
    return first - stride if stride > 0 and first % stride == 0 else max(first - 1, 0)
