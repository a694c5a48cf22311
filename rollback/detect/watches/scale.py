"""The loss scale of fp16 training: one halving is an overflow and a skipped step, several in a row are a warning.

GLM-130B's scale fell thirty steps before its loss exploded. A scale that starts too high falls in the first steps of
every launch, so a fall counts only after the scale has been constant for a while. A scale that lies at its floor of one
after it was far higher is told in those words.
"""

from __future__ import annotations

from rollback.detect.constants import NON_FINITE_POINTS, USUAL_POINTS
from rollback.detect.events import Kind, Tier
from rollback.detect.watches import Finding

FALLS, FALL_POINTS = 4, 400  # in a row, without a rise between them, within so many points: a sixteenth
FLOOR, FLOOR_FALL = 1.0, 16.0  # a scale that fell by this factor to its floor


class ScaleWatch:
    """A fold over the loss scale."""

    __slots__ = ("collapsed", "falls", "first_row", "first_step", "floored", "last", "start", "steady", "top")

    def __init__(self) -> None:
        self.last: float | None = None
        self.steady = 0  # points without a fall
        self.falls = 0  # in a row
        self.floored = 0  # points in a row at the floor
        self.start = self.top = 0.0  # the scale before the first fall, and the highest
        self.first_row = self.first_step = 0
        self.collapsed = False

    def restart(self) -> None:
        """Forget the scale before: a launch begins, and its scale may start high and fall again."""
        self.last, self.steady, self.falls, self.floored, self.top = None, 0, 0, 0, 0.0

    def feed(self, row: int, step: int, scale: float) -> Finding | None:
        """Fold one point; returns a collapse that begins or is over."""
        last, self.last = self.last, scale
        if scale - scale != 0.0:
            return None
        self.top = max(self.top, scale)
        self.floored = self.floored + 1 if scale <= FLOOR < self.top / FLOOR_FALL else 0
        if self.floored == 1 and not self.falls:
            self.first_row, self.first_step = row, step
        if self.floored == NON_FINITE_POINTS and not self.collapsed:
            self.start = self.top
            return self._collapse(f"the loss scale fell from {self.top:g} to its floor of {scale:g}")
        if last is None:
            return None
        if scale < last:
            return self._fall(row, step, last, scale)
        self.steady += 1
        if scale == last:
            return None
        self.falls = 0
        if not self.collapsed or scale < self.start / 4.0:
            return None
        self.collapsed = False
        return self._finding(f"loss scale {scale:g}: growing again", ends=True)

    def _fall(self, row: int, step: int, last: float, scale: float) -> Finding | None:
        if self.falls == 0 or row - self.first_row > FALL_POINTS:
            self.falls = 0
            if self.steady < 2 * USUAL_POINTS:
                self.steady = 0
                return None
            self.first_row, self.first_step, self.start = row, step, last
        self.steady = 0
        self.falls += 1
        if self.falls < FALLS or self.collapsed:
            return None
        return self._collapse(f"loss scale fell from {self.start:g} to {scale:g}: {self.falls} reductions in a row")

    def _collapse(self, sentence: str) -> Finding:
        self.collapsed = True
        return self._finding(sentence)

    def _finding(self, sentence: str, *, ends: bool = False) -> Finding:
        kind, tier = Kind.LEVEL_SHIFT, Tier.WARN
        return Finding(kind=kind, tier=tier, sentence=sentence, row=self.first_row, step=self.first_step, ends=ends)
