"""The learning rate against what was intended: the first logged line of a launch decides.

With an expectation (a channel `lr/expected`, from the LR ledger or the contract) the observed LR must agree to 1 %.
Without one, three things are said: an LR that went back to almost nothing, an LR above everything this run has ever
used, and an LR that at a step logged twice is not the one of the parent launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TOLERANCE = 0.01
RESTARTED = 0.2  # of the LR before: a fresh warm-up, not a decision of a person
RAISED = 1.2
SETTLED_POINTS = 32


@dataclass(frozen=True, slots=True)
class LrFinding:
    """One mismatch that begins or ends; `expected` is None where only the run's own past speaks."""

    begins: bool
    found: float
    expected: float | None
    sentence: str


class LrWatch:
    """A fold over the observed and the expected learning rate."""

    __slots__ = ("highest", "last", "mismatch", "reference", "rising")

    def __init__(self) -> None:
        self.last: float | None = None
        self.highest = 0.0
        self.rising = 0  # points since the LR last rose: warm-up is over when this is large
        self.mismatch = False
        self.reference: float | None = None

    def feed(self, found: float, expected: float | None) -> LrFinding | None:
        """Fold one point; returns a finding when a mismatch begins or ends."""
        if found - found != 0.0:
            return None
        finding = self._against(found, expected) if expected is not None else self._against_past(found)
        settled = self.rising >= SETTLED_POINTS
        self.rising = 0 if self.last is not None and found > self.last * (1.0 + 1e-9) else self.rising + 1
        if settled and self.rising == 0 and not self.mismatch:
            self.rising = SETTLED_POINTS  # a small rise after warm-up does not bring warm-up back
        self.last = found
        if found > self.highest and not self.mismatch:
            self.highest = found
        return finding

    def _against(self, found: float, expected: float) -> LrFinding | None:
        wrong = abs(found - expected) > TOLERANCE * abs(expected)
        if wrong == self.mismatch:
            return None
        self.mismatch = wrong
        text = f"lr {found:.4g}, expected {expected:.4g}" if wrong else f"lr {found:.4g} is as expected again"
        return LrFinding(wrong, found, expected, text)

    def _against_past(self, found: float) -> LrFinding | None:
        last = self.last
        if last is None or self.rising < SETTLED_POINTS:
            return None
        if self.mismatch:
            assert self.reference is not None
            if not RESTARTED * self.reference <= found <= RAISED * self.reference:
                return None
            self.mismatch = False
            return LrFinding(False, found, None, f"lr {found:.4g} is back where it was")
        if found > RAISED * self.highest > 0.0:
            return self._begin(found, last, f"lr rose from {last:.4g} to {found:.4g}, above all this run has used")
        if 0.0 < found < RESTARTED * last and found < 0.01 * self.highest:
            return self._begin(found, last, f"lr fell from {last:.4g} to {found:.4g}, as if the schedule began anew")
        return None

    def _begin(self, found: float, last: float, text: str) -> LrFinding:
        self.mismatch, self.reference = True, last
        return LrFinding(True, found, None, text)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> LrWatch:
        watch = cls()
        for name in cls.__slots__:
            setattr(watch, name, record[name])
        return watch
