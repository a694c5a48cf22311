"""The rhythm of a launch: how long it is usually silent between two signs of progress, and which rank slows it down.

A sign is an optimizer step or a forward pass of a guarded rank (its pulse), else a printed step or a new line of metrics, else
any output. Nothing is configured: a silence is long when it exceeds twice the 99th percentile of the gaps so far. The first two
gaps are start-up (imports, the first compilation) and teach nothing about steps. How long the start-up and single silences
took is kept for the next launch (`launch.end`, field `rhythm`).

Ranks that synchronise have equal step times, because all wait for the slowest. What differs is a rank's own time: from its step
to its next forward pass (data, the loop, logging), which contains no wait for others. A rank whose own time exceeds that of the
middle rank by a fifth of a step, in five rounds of at least 20 steps in a row, is a straggler. Of a round the median second
counts: a rank that saves and evaluates for all is slow in a few of them. A rank that is slow inside its kernels is not seen.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["Rhythm", "Silences", "Straggler", "Stragglers"]

FACTOR = 2.0  # of the 99th percentile
FLOOR_SECONDS = 11.0  # nothing is looked at before: a process may wait that long for a machine that others use
START_SECONDS = 120.0  # before steps are known: imports, downloads, rendezvous
NUM_START = 2  # signs
NUM_GAPS = 2000
MOST_AT_ONCE = 5  # of many signs that came together only a few are learned


class Rhythm:
    """Signs of one source: a rank, or the launch. Times in seconds, of one clock."""

    def __init__(self, now: float, start_seconds: float = 0.0) -> None:
        """`start_seconds`: how long the start of an earlier launch took; 0: not known."""
        self._began = self.last = now
        self._count = 0
        self._known_start = start_seconds
        self._gaps: deque[float] = deque(maxlen=NUM_GAPS)
        self._sorted: list[float] = []
        self.start_seconds: float | None = None  # until the steps began, once they have

    def sign(self, now: float, count: int = 1) -> None:
        """`count` signs have come since the last call, the newest at `now`."""
        if count <= 0 or now < self.last:
            return
        gap = (now - self.last) / count
        self.last = now
        for _ in range(min(count, MOST_AT_ONCE)):
            self._count += 1
            if self._count == NUM_START:
                self.start_seconds = now - self._began
            if self._count > NUM_START:
                self._learn(gap)

    def _learn(self, gap: float) -> None:
        if len(self._gaps) == NUM_GAPS:
            self._sorted.remove(self._gaps[0])
        self._gaps.append(gap)
        insort(self._sorted, gap)

    @property
    def started(self) -> bool:
        """Whether enough gaps are known to speak of a rhythm."""
        return len(self._gaps) >= NUM_START

    @property
    def usual(self) -> float | None:
        """The median gap; None before the steps began."""
        return self._sorted[len(self._sorted) // 2] if self.started else None

    @property
    def p99(self) -> float | None:
        """The 99th percentile of the gaps; None before the steps began."""
        return self._sorted[int(0.99 * (len(self._sorted) - 1))] if self.started else None

    @property
    def limit(self) -> float:
        """The silence from which on the ranks are looked at."""
        if self.p99 is None:
            return max(START_SECONDS, FACTOR * self._known_start)
        return FLOOR_SECONDS + FACTOR * self.p99

    def age(self, now: float) -> float:
        """Seconds since the last sign."""
        return max(0.0, now - self.last)


class Silences:
    """Long silences that ended by themselves, by the place in which the ranks were: a save, an evaluation, an upload.

    A place is told only when it lasts twice as long as it ever did.
    """

    MOST = 32

    def __init__(self, known: Mapping[str, Any] | None = None) -> None:
        """`known`: place -> seconds, from an earlier launch."""
        pairs = known.items() if isinstance(known, Mapping) else ()
        self._seconds = {str(place): float(value) for place, value in pairs if isinstance(value, int | float)}

    def ended(self, places: frozenset[str], seconds: float) -> None:
        """A silence in these places is over."""
        for place in places:
            self._seconds[place] = max(seconds, self._seconds.get(place, 0.0))
        while len(self._seconds) > self.MOST:
            self._seconds.pop(next(iter(self._seconds)))

    def patience(self, places: frozenset[str]) -> float:
        """How long a silence in these places is left alone; 0 where none of them is known."""
        return FACTOR * max((self._seconds.get(place, 0.0) for place in places), default=0.0)

    def to_json(self) -> dict[str, float]:
        """The form in the journal."""
        return {place: round(seconds, 1) for place, seconds in self._seconds.items()}


# --- stragglers

NUM_STEPS = 20
NUM_ROUNDS = 5
SHARE = 0.2  # of a step
LEAST_SECONDS = 0.002  # a timer's and a scheduler's noise


class Straggler(NamedTuple):
    """A slow rank; times are seconds a step."""

    rank: int
    own: float
    others: float
    step: float


class _Window(NamedTuple):
    steps: int
    own: float
    time: float


def _middle(own: list[tuple[float, int]]) -> float:
    """The median of values that each stand for so many steps."""
    half, passed = sum(steps for _, steps in own) / 2, 0
    for value, steps in sorted(own):
        passed += steps
        if passed >= half:
            return value
    return 0.0


class Stragglers:
    """Compares the own times of ranks in rounds; each rank is told once."""

    def __init__(self) -> None:
        self._begin: dict[int, _Window] = {}
        self._last: dict[int, _Window] = {}
        self._own: dict[int, list[tuple[float, int]]] = {}  # of this round, by rank: own seconds a step, for so many steps
        self._slow: dict[int, int] = {}  # rank -> rounds in a row
        self._told: set[int] = set()

    def feed(self, ranks: Mapping[int, tuple[int, float, float]]) -> list[Straggler]:
        """By rank: steps taken, seconds of its own time, and the moment of its last step; returns newly found stragglers."""
        if len(ranks) < 2:
            return []
        now = {rank: _Window(*values) for rank, values in ranks.items()}
        before = self._begin
        if before.keys() != now.keys() or any(now[rank].steps < before[rank].steps for rank in now):
            self._begin, self._last, self._own, self._slow = now, dict(now), {}, {}
            return []
        for rank, one in now.items():
            if (steps := one.steps - self._last[rank].steps) > 0:
                self._own.setdefault(rank, []).append(((one.own - self._last[rank].own) / steps, steps))
                self._last[rank] = one
        taken = {rank: now[rank].steps - before[rank].steps for rank in now}
        if min(taken.values()) < NUM_STEPS:
            return []
        self._begin = now
        own, self._own = {rank: _middle(self._own[rank]) for rank in now}, {}
        step = max((now[rank].time - before[rank].time) / taken[rank] for rank in now)
        found = []
        for rank, seconds in own.items():
            others = sorted(value for other, value in own.items() if other != rank)
            middle = others[(len(others) - 1) // 2]
            slow = seconds - middle > max(SHARE * step, LEAST_SECONDS)
            self._slow[rank] = self._slow.get(rank, 0) + 1 if slow else 0
            if self._slow[rank] == NUM_ROUNDS and rank not in self._told:
                self._told.add(rank)
                found.append(Straggler(rank, seconds, middle, step))
        return found
