"""The loss scale of fp16 training: one halving is an overflow and a skipped step, a fall to a sixteenth is a warning.

GLM-130B's scale fell thirty steps before its loss exploded. A scale that starts too high falls in the first steps of
every launch, so a fall counts only from a scale that has been constant for a while.
"""

from __future__ import annotations

from rollback.detect.constants import USUAL_POINTS
from rollback.detect.events import Kind, Tier
from rollback.detect.watches import Finding

FALL, BACK = 16.0, 4.0  # a fall by this factor is told; within this factor of what it was, it is over
FLOOR = 1.0  # no scale goes lower


class ScaleWatch:
    """A fold over the loss scale."""

    def __init__(self) -> None:
        self.collapsed = False
        self.restart()

    def restart(self) -> None:
        """Forget the scale before: a launch begins, and its scale may start high and fall again."""
        self.last = self.start = 0.0  # start: the scale that it fell from, while it has not been constant since
        self.steady = 0  # points without a fall
        self.first_row = self.first_step = 0  # of the fall

    def feed(self, row: int, step: int, scale: float) -> Finding | None:
        """Fold one point; returns a collapse that begins or is over."""
        if scale - scale != 0.0:
            return None
        fell, self.last = scale < self.last, scale
        if fell and self.steady >= 2 * USUAL_POINTS and not self.collapsed:
            self.first_row, self.first_step = row, step
        self.steady += 1
        if fell:
            self.steady = 0
        if self.steady >= 2 * USUAL_POINTS and not self.collapsed:
            self.start = scale
        if not self.collapsed and scale * FALL <= self.start:
            self.collapsed = True
            floor = "its floor of " if scale <= FLOOR else ""
            return self._finding(f"the loss scale fell from {self.start:g} to {floor}{scale:g}")
        if self.collapsed and scale * BACK >= self.start:
            self.collapsed = False
            return self._finding(f"loss scale {scale:g}: growing again", ends=True)
        return None

    def _finding(self, sentence: str, *, ends: bool = False) -> Finding:
        row, step = self.first_row, self.first_step
        return Finding(kind=Kind.LEVEL_SHIFT, tier=Tier.WARN, sentence=sentence, row=row, step=step, ends=ends)
