"""The order of the points themselves: launches, rewinds, log intervals. No value is looked at here.

A segment starts where a launch begins or where the step goes back; what follows may be a resume bump. A change of the
log interval (AlgoPerf's PyTorch runs log the first 100 steps one by one, then every 500th) starts new baselines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SAME_INTERVAL = 4.0  # a factor below this is irregular logging, not another interval
CONFIRM = 3


@dataclass(frozen=True, slots=True)
class Placement:
    """How one point follows the one before it."""

    segment_start: bool = False
    rewound_from: int | None = None
    new_interval: bool = False
    repeated: bool = False


REPEATS_AT_MOST = 8  # more points than that under one step: the step column counts something else


ORDINARY = Placement()
REPEATED = Placement(repeated=True)


class Stream:
    """A fold over (step, launch); `interval` is the usual number of steps between two points."""

    __slots__ = ("candidate", "candidate_count", "interval", "last_launch", "last_step", "points", "repeats")

    def __init__(self) -> None:
        self.last_step: int | None = None
        self.last_launch: int | None = None
        self.interval = 0.0
        self.candidate = 0.0
        self.candidate_count = 0
        self.points = 0
        self.repeats = 0  # points with this very step; negative once repeats are known to be the rule

    def feed(self, step: int, launch: int | None) -> Placement:
        last, previous_launch = self.last_step, self.last_launch
        self.last_step, self.last_launch = step, launch
        self.points += 1
        if last is None:
            return ORDINARY
        started = launch != previous_launch and launch is not None and previous_launch is not None
        if step < last:
            return Placement(segment_start=True, rewound_from=last)
        delta = step - last
        if delta == 0 and not started:
            return self._repeat()
        if self.repeats > 0:
            self.repeats = 0
        if delta == self.interval and not started:
            self.candidate_count = 0
            return ORDINARY
        changed = self._follow_interval(float(delta))
        return Placement(segment_start=started, new_interval=changed)

    def _repeat(self) -> Placement:
        """The same step again: a second writer, or a picture's pixels. The first value of a step speaks for it."""
        if self.repeats < 0:
            return ORDINARY
        self.repeats += 1
        if self.repeats > REPEATS_AT_MOST:
            self.repeats = -1
        return REPEATED

    def _follow_interval(self, delta: float) -> bool:
        """Accept another interval after three points of it; True when it replaces one that was in use."""
        if self.interval == 0.0:
            self.interval = delta
            return False
        if delta <= 0.0:
            return False
        if 1 / SAME_INTERVAL < delta / self.interval < SAME_INTERVAL:
            self.interval += (delta - self.interval) * 0.05
            self.candidate_count = 0
            return False
        if self.candidate > 0.0 and 1 / SAME_INTERVAL < delta / self.candidate < SAME_INTERVAL:
            self.candidate_count += 1
        else:
            self.candidate, self.candidate_count = delta, 1
        if self.candidate_count < CONFIRM:
            return False
        self.interval, self.candidate_count = delta, 0
        return True

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Stream:
        stream = cls()
        for name in cls.__slots__:
            setattr(stream, name, record[name])
        return stream
