"""The rhythm of a launch: how long it is usually silent between two signs of progress.

A sign is an optimizer step or a forward pass of a guarded rank (its pulse), else a printed step or a new line of metrics, else
any output. Nothing is configured: a silence is long when it exceeds twice the 99th percentile of the gaps so far. The first two
gaps are start-up (imports, the first compilation) and teach nothing about steps. How long the start-up and single silences
took is kept for the next launch (`launch.end`, field `rhythm`).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping
from typing import Any

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
