"""The loss scale of fp16 training: one halving is an overflow and a skipped step, several in a row are a run in trouble.

A scale that starts too high comes down by itself in the first steps, so a fall counts only after the scale has stood
still for a while. GLM-130B's fell thirty steps before its loss exploded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STEADY_POINTS = 64
FALLS = 4  # in a row, without a rise between them: a sixteenth
FALL_POINTS = 400


@dataclass(frozen=True, slots=True)
class ScaleFinding:
    """A collapse that begins or is over; `row` and `step` are those of its first halving."""

    begins: bool
    row: int
    step: int
    sentence: str


class ScaleWatch:
    """A fold over the loss scale."""

    __slots__ = ("collapsed", "falls", "first_row", "first_step", "last", "start", "steady")

    def __init__(self) -> None:
        self.last: float | None = None
        self.steady = 0  # points without a fall
        self.falls = 0  # in a row
        self.start = 0.0  # the scale before the first of them
        self.first_row = self.first_step = 0
        self.collapsed = False

    def restart(self) -> None:
        """A launch begins: its scale is that of its checkpoint."""
        self.last, self.steady, self.falls = None, 0, 0

    def feed(self, row: int, step: int, scale: float) -> ScaleFinding | None:
        last, self.last = self.last, scale
        if last is None or scale - scale != 0.0:
            return None
        if scale < last:
            return self._fall(row, step, last, scale)
        self.steady += 1
        if scale > last:
            self.falls = 0
            if self.collapsed and scale >= self.start / 4.0:
                self.collapsed = False
                return ScaleFinding(False, self.first_row, self.first_step, f"loss scale {scale:g}: it grows again")
        return None

    def _fall(self, row: int, step: int, last: float, scale: float) -> ScaleFinding | None:
        if self.falls == 0 or row - self.first_row > FALL_POINTS:
            self.falls = 0
            if self.steady < STEADY_POINTS:
                self.steady = 0
                return None
            self.first_row, self.first_step, self.start = row, step, last
        self.steady = 0
        self.falls += 1
        if self.falls < FALLS or self.collapsed:
            return None
        self.collapsed = True
        text = f"loss scale fell from {self.start:g} to {scale:g}, {self.falls} times in a row"
        return ScaleFinding(True, self.first_row, self.first_step, text)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> ScaleWatch:
        watch = cls()
        for name in cls.__slots__:
            setattr(watch, name, record[name])
        return watch
