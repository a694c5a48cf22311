"""The learning rate: against what was promised, else against the run's own past.

With an expectation (channel `lr/expected`, from the contract) the observed LR must agree to 1 %. Without one four things
are reported: an LR that fell to almost nothing; one that fell at the start of a launch and climbs again; one higher than
ever in this run; one that jumped up where a launch began, against the last point or against the parent at the same
step. Decays by any factor of a usual schedule are not reported.
"""

from __future__ import annotations

from collections import deque

from rollback.detect.constants import USUAL_POINTS
from rollback.detect.events import Kind, Status, Tier
from rollback.detect.watches import Finding

TOLERANCE = 0.01
VANISHED = 0.02  # of the LR before, from one point to the next: no schedule decays like that
SPENT = 0.05  # of the highest LR: below that a schedule is at its end and may step to zero
RAISED = 1.2
CLIMB_POINTS = 8  # rises in a row that make a warm-up
ROSE = 1.0 + 1e-9


class LrWatch:
    """A fold over the observed and the expected learning rate."""

    def __init__(self) -> None:
        self.last: float | None = None
        self.highest = 0.0
        self.settled = 0  # points since the warm-up's last rise
        self.mismatch = False
        self.reference = 0.0  # what the LR was before the mismatch
        self.fallen_from = 0.0  # the LR before it fell at the start of a launch
        self.climb = 0
        self.past: deque[tuple[int, float]] = deque(maxlen=2048)

    def feed(
        self, found: float, expected: float | None, *, row: int = 0, step: int = 0, fresh: bool = False, rewound: bool = False
    ) -> Finding | None:
        """Fold one point; `fresh` says that a launch has just begun, `rewound` that its steps were logged before."""
        if found - found != 0.0:
            return None
        wrong, sentence = self.mismatch, ""
        if expected is not None:
            wrong = abs(found - expected) > TOLERANCE * abs(expected)
            sentence = f"lr {found:.4g}, expected {expected:.4g}" if wrong else f"lr {found:.4g}, as expected again"
            self.reference = expected
        elif self.mismatch:  # not exactly as before, because the schedule has moved on
            wrong = not 0.5 * self.reference <= found <= 1.1 * self.reference
            sentence = f"lr {found:.4g}, back at its earlier value"
        elif self.last is not None and self.settled >= USUAL_POINTS:
            sentence = self._against_past(found, self.last, step, fresh, rewound)
            wrong = bool(sentence)
        begins, changes = wrong, wrong is not self.mismatch
        self.mismatch = wrong
        self._remember(found, step)
        if not changes:
            return None
        return Finding(
            kind=Kind.LR_MISMATCH, sentence=sentence, row=row, step=step, ends=not begins, expected=expected,
            tier=Tier.WARN if expected is None else Tier.PROPOSE, status=Status.OPEN,
        )  # fmt: skip

    def _remember(self, found: float, step: int) -> None:
        rose = self.last is not None and found > self.last * ROSE
        self.settled = 0 if rose and self.settled < USUAL_POINTS else self.settled + 1
        self.last = found
        if self.mismatch:
            return
        self.highest = max(self.highest, found)
        while self.past and self.past[-1][0] >= step:
            self.past.pop()
        self.past.append((step, found))

    def _against_past(self, found: float, last: float, step: int, fresh: bool, rewound: bool) -> str:
        """Return what is wrong with this LR; an empty text where nothing is."""
        self.reference = last
        if found > RAISED * self.highest > 0.0:
            return f"lr rose from {last:.4g} to {found:.4g}, higher than ever in this run"
        if 0.0 <= found < VANISHED * last and last > SPENT * self.highest:
            return f"lr fell from {last:.4g} to {found:.4g}: the schedule probably restarted"
        if fresh:
            parent = self._parent_at(step) if rewound else last
            if parent is not None and found > RAISED * parent:
                self.reference = parent
                return f"lr {found:.4g}, {found / parent:.3g} × the parent launch's {parent:.4g}"
        return self._follow_climb(found, last, fresh)

    def _follow_climb(self, found: float, last: float, fresh: bool) -> str:
        """Find a repeated warm-up in a coarse log, whose first line may lie well into it: the LR fell and now climbs."""
        if found < 0.5 * last and (fresh or last > SPENT * self.highest):
            self.fallen_from, self.climb = last, 0
            return ""
        if not self.fallen_from:
            return ""
        self.climb = self.climb + 1 if found > last * ROSE else 0
        before = self.fallen_from
        if self.climb >= CLIMB_POINTS:
            self.reference, self.fallen_from = before, 0.0
            return f"lr fell from {before:.4g} and climbs again, now {found:.4g}: the warm-up is repeated"
        if not fresh and self.climb == 0:
            self.fallen_from = 0.0
        return ""

    def _parent_at(self, step: int) -> float | None:
        """Return the LR that was logged before at this step, or at the nearest earlier one."""
        earlier = [lr for known, lr in self.past if known <= step]
        return earlier[-1] if earlier else None
