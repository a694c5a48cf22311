"""The live detector as the supervisor's guest: asked once a second, never allowed to end a run by accident.

Also notes the first step a launch logs, when nobody else has said where it started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from chronicle.metrics.log import Point, parse_line

__all__ = ["Watcher", "last_point"]

TAIL_BYTES = 1 << 16


class Poll(Protocol):
    """The part of `chronicle.watch.LiveWatch` used here."""

    def poll(self) -> Iterable[object]:
        """New events; each has a `tier`."""


class Watcher:
    """`look()` is True once when a propose-tier event asks for a stop; `event` is that event."""

    def __init__(self, live: Poll | None, *, stop_on_proposal: bool, complain: Callable[[str], None]) -> None:
        self._live = live
        self._stop = stop_on_proposal
        self._complain = complain
        self.event: object | None = None

    def look(self) -> bool:
        """Poll the detector; whatever goes wrong in it is said once and switches it off."""
        if self._live is None:
            return False
        try:
            events = list(self._live.poll())
        except Exception as error:  # noqa: BLE001 a defect in the detector must not cost the run
            self._complain(f"the live detector failed and is off: {type(error).__name__}: {error}")
            self._live = None
            return False
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
