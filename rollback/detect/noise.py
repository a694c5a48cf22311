"""Sense the number format behind a logged series: bf16 and fp16 values lie on a coarse grid.

The 80B run of the seed logged a bf16 loss: between 1 and 2 its quantum is 2^-7 = 0.0078, two thirds of its noise.
A median absolute deviation over such values is 0 or 1 quantum, so every scale needs half the quantum as a floor.
"""

from __future__ import annotations

import math

BF16_BITS = 7
FP16_BITS = 10
PRINT_TOLERANCE = 6e-5  # four printed decimals
SHARE_ON_GRID = 0.98
MIN_VALUES = 64
SHARE_TIED = 0.15  # noise of 1.5 quanta repeats a value in 19 % of all steps
MIN_TIED_VALUES = 20


def quantum_at(value: float, bits: int) -> float:
    """Return the distance of neighbouring numbers around `value` for a format with `bits` mantissa bits."""
    if value == 0.0 or value - value != 0.0:
        return 0.0
    return math.ldexp(1.0, math.frexp(abs(value))[1] - 1 - bits)


def is_on_grid(value: float, bits: int) -> bool:
    """Say whether a printed value is one that the format can hold; a quantum below the print tolerance proves nothing."""
    quantum = quantum_at(value, bits)
    if quantum <= 4 * PRINT_TOLERANCE:
        return False
    return abs(value - round(value / quantum) * quantum) <= PRINT_TOLERANCE


class GridSense:
    """Sense the quantum of a series: its values lie on the bf16 or fp16 grid, or they repeat too often for a real number.

    The second test finds every other rounding (two printed decimals, a plot's pixels): of independent real numbers no
    two neighbours are equal, so where a seventh of them are, the smallest difference seen is the quantum.
    """

    __slots__ = ("bf16", "fp16", "last", "least", "seen", "ties")

    def __init__(
        self, seen: int = 0, bf16: int = 0, fp16: int = 0, ties: int = 0, last: float = math.nan, least: float = 0.0
    ) -> None:
        self.seen, self.bf16, self.fp16 = seen, bf16, fp16
        self.ties, self.last, self.least = ties, last, least

    def feed(self, value: float) -> None:
        """Fold one finite value."""
        self.seen += 1
        self.bf16 += is_on_grid(value, BF16_BITS)
        self.fp16 += is_on_grid(value, FP16_BITS)
        gap = abs(value - self.last)
        self.last = value
        if gap == 0.0:
            self.ties += 1
        elif self.least == 0.0 or gap < self.least:
            self.least = gap if gap == gap else 0.0

    def quantum(self, value: float) -> float:
        """Return the grid's step at `value`, 0.0 while no grid is proved."""
        if self.seen >= MIN_VALUES:
            for count, bits in ((self.bf16, BF16_BITS), (self.fp16, FP16_BITS)):
                if count >= SHARE_ON_GRID * self.seen:
                    return quantum_at(value, bits)
        if self.seen >= MIN_TIED_VALUES and self.ties >= SHARE_TIED * self.seen:
            return self.least
        return 0.0

    def to_json(self) -> list[float]:
        return [self.seen, self.bf16, self.fp16, self.ties, self.last, self.least]
