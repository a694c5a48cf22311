"""The live detector as the supervisor's guest: asked once a second, never allowed to end a run by accident.

Also reads from the per-step log where a launch started, for trainers that do not say it themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Protocol

from chronicle.metrics.log import Point, parse_line, read_metrics

__all__ = ["LiveDetector", "Watcher", "last_point", "read_start_step", "tier_of"]

TAIL_BYTES = 1 << 16


class LiveDetector(Protocol):
    """The part of `chronicle.watch.LiveWatch` used here; an event has a `tier`."""

    def poll(self) -> Iterable[object]:
        """Events opened or changed since the last call."""

    def finish(self) -> Iterable[object]:
        """The same for the rest of the log, after the launch has ended."""


class Watcher:
    """`look()` is True once when a propose-tier event asks for a stop; `event` is that event."""

    def __init__(
        self, live: LiveDetector | None, *, stop_on_proposal: bool, complain: Callable[[str], None]
    ) -> None:
        self._live = live
        self._stop = stop_on_proposal
        self._complain = complain
        self.event: object | None = None

    def look(self) -> bool:
        """Poll the detector; whatever goes wrong in it is said once and switches it off."""
        if self._live is None:
            return False
        return self._judge(self._ask(self._live.poll))

    def finish(self) -> None:
        """Let the detector read the rest of the log and judge what is still open."""
        if self._live is not None:
            self._judge(self._ask(self._live.finish))

    def _ask(self, question: Callable[[], Iterable[object]]) -> list[object]:
        try:
            return list(question())
        except Exception as error:  # noqa: BLE001 a defect in the detector must not cost the run
            self._complain(f"the live detector failed and is off: {type(error).__name__}: {error}")
            self._live = None
            return []

    def _judge(self, events: Iterable[object]) -> bool:
        proposing = [event for event in events if tier_of(event) == "propose"]
        if not proposing or not self._stop or self.event is not None:
            return False
        self.event = proposing[0]
        return True


def tier_of(event: object) -> str:
    """The tier's word, whether it comes as an enum or as text."""
    tier = getattr(event, "tier", "")
    return str(getattr(tier, "value", tier)).lower()


def last_point(path: Path) -> Point | None:
    """The last whole line of a `metrics.jsonl`; None when there is none."""
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
    """Steps completed before the first one logged, by the distance of the first two lines; None until both are there.

    A trainer that logs every tenth step writes 10, 20, …: it started at 0, not at 9.
    """
    try:
        first, second = (point.step for point in islice(read_metrics(path), 2))
    except (OSError, ValueError):
        return None
    stride = second - first
    return first - stride if stride > 0 and first % stride == 0 else max(first - 1, 0)
