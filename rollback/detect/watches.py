"""The learning rate against what was intended: the first logged line of a launch decides.

With an expectation (a channel `lr/expected`, from the LR ledger or the contract) the observed LR must agree to 1 %.
Without one, the run's own past speaks. Four things are said: an LR that went back to almost nothing; one that fell at
the start of a launch and climbs again; one above everything this run has used; one that jumped up where a launch
began, be it against the last point or against the parent at the same step. Decays, by any factor of a usual schedule,
are nobody's accident.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

TOLERANCE = 0.01
VANISHED = 0.02  # of the LR before, from one point to the next: no schedule decays like that
SPENT = 0.05  # of the highest LR: below that a schedule is at its end and may well step to zero
RAISED = 1.2
SETTLED_POINTS = 32
CLIMB_POINTS = 8
PARENT_POINTS = 2048


@dataclass(frozen=True, slots=True)
class LrFinding:
    """One mismatch that begins or ends; `expected` is None where only the run's own past speaks."""

    begins: bool
    found: float
    expected: float | None
    sentence: str


class LrWatch:
    """A fold over the observed and the expected learning rate."""

    __slots__ = ("climb", "fallen_from", "highest", "last", "mismatch", "past", "reference", "settled")

    def __init__(self) -> None:
        self.last: float | None = None
        self.highest = 0.0
        self.settled = 0  # points since the warm-up's last rise
        self.mismatch = False
        self.reference = 0.0  # what the LR was before the mismatch
        self.fallen_from = 0.0  # the LR before it fell at the start of a launch
        self.climb = 0
        self.past: deque[tuple[int, float]] = deque(maxlen=PARENT_POINTS)

    def feed(
        self, found: float, expected: float | None, *, step: int = 0, fresh: bool = False, rewound: bool = False
    ) -> LrFinding | None:
        """Fold one point; `fresh` says that a launch has just begun, `rewound` that its steps were logged before."""
        if found - found != 0.0:
            return None
        if expected is not None:
            finding = self._against(found, expected)
        elif self.mismatch:
            finding = self._look_for_end(found)
        else:
            finding = self._against_past(found, step, fresh, rewound)
        self._remember(found, step)
        return finding

    def _remember(self, found: float, step: int) -> None:
        last = self.last
        rose = last is not None and found > last * (1.0 + 1e-9)
        self.settled = 0 if rose and self.settled < SETTLED_POINTS else self.settled + 1
        self.last = found
        if not self.mismatch:
            self.highest = max(self.highest, found)
            while self.past and self.past[-1][0] >= step:
                self.past.pop()
            self.past.append((step, found))

    def _against(self, found: float, expected: float) -> LrFinding | None:
        wrong = abs(found - expected) > TOLERANCE * abs(expected)
        if wrong == self.mismatch:
            return None
        self.mismatch, self.reference = wrong, expected
        text = f"lr {found:.4g}, expected {expected:.4g}" if wrong else f"lr {found:.4g} is as expected again"
        return LrFinding(wrong, found, expected, text)

    def _look_for_end(self, found: float) -> LrFinding | None:
        """Over when the LR is near what it was before; a schedule has moved on by then, so not exactly."""
        if not 0.5 * self.reference <= found <= 1.1 * self.reference:
            return None
        self.mismatch = False
        return LrFinding(False, found, None, f"lr {found:.4g} is back where it was")

    def _against_past(self, found: float, step: int, fresh: bool, rewound: bool) -> LrFinding | None:
        last = self.last
        if last is None or self.settled < SETTLED_POINTS:
            return None
        if found > RAISED * self.highest > 0.0:
            return self._begin(found, last, f"lr rose from {last:.4g} to {found:.4g}, above all this run has used")
        if 0.0 <= found < VANISHED * last and last > SPENT * self.highest:
            return self._begin(found, last, f"lr fell from {last:.4g} to {found:.4g}, as if the schedule began anew")
        if fresh:
            parent = self._parent_at(step) if rewound else last
            if parent is not None and found > RAISED * parent:
                return self._begin(found, parent, f"lr {found:.4g}, {found / parent:.3g} × the parent launch's {parent:.4g}")
        return self._follow_climb(found, last, fresh)

    def _follow_climb(self, found: float, last: float, fresh: bool) -> LrFinding | None:
        """A coarse log's first line may lie well into a repeated warm-up: it fell, and now it climbs."""
        if found < 0.5 * last and (fresh or last > SPENT * self.highest):
            self.fallen_from, self.climb = last, 0
        elif self.fallen_from:
            self.climb = self.climb + 1 if found > last * (1.0 + 1e-9) else 0
            if self.climb >= CLIMB_POINTS:
                before, self.fallen_from = self.fallen_from, 0.0
                text = f"lr fell from {before:.4g} and climbs, {found:.4g} now: the warm-up is repeated"
                return self._begin(found, before, text)
            if not fresh and self.climb == 0:
                self.fallen_from = 0.0
        return None

    def _parent_at(self, step: int) -> float | None:
        """The LR at this step when it was logged before, interpolated by the nearest earlier point."""
        earlier = [lr for known, lr in self.past if known <= step]
        return earlier[-1] if earlier else None

    def _begin(self, found: float, before: float, text: str) -> LrFinding:
        self.mismatch, self.reference = True, before
        return LrFinding(True, found, None, text)

    def to_json(self) -> dict[str, Any]:
        record = {name: getattr(self, name) for name in self.__slots__}
        record["past"] = [list(item) for item in self.past]
        return record

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> LrWatch:
        watch = cls()
        for name in cls.__slots__:
            if name != "past":
                setattr(watch, name, record[name])
        watch.past.extend((step, lr) for step, lr in record["past"])
        return watch
