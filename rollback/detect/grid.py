"""The rounding of a series: values on the grid of a number format, or printed with few digits, have no finer noise."""

from __future__ import annotations

import math

BF16_BITS, FP16_BITS = 7, 10
PRINTED = 6e-5  # four printed decimals still lie on the grid
ON_GRID, SURE_VALUES = 0.98, 64  # of so many values
TIED, TIED_VALUES = 0.15, 20  # noise of 1.5 quanta repeats a value in 19 % of all steps


def quantum_at(value: float, bits: int) -> float:
    """Return the distance of neighbouring numbers around `value` for a format with `bits` mantissa bits."""
    if value == 0.0:
        return 0.0
    return math.ldexp(1.0, math.frexp(abs(value))[1] - 1 - bits)


class Grid:
    """Find the quantum of a series: its values lie on the bf16 or fp16 grid, or neighbours are equal too often.

    The 80B run of the seed logged a bf16 loss: between 1 and 2 its quantum is 2^-7 = 0.0078, two thirds of its noise.
    The second test finds other roundings: independent real numbers are never equal.
    """

    def __init__(self) -> None:
        self.seen = self.bf16 = self.fp16 = self.ties = 0
        self.last, self.least = math.nan, 0.0

    def feed(self, value: float) -> None:
        """Fold one finite value."""
        self.seen += 1
        self.bf16 += _lies_on(value, quantum_at(value, BF16_BITS))
        self.fp16 += _lies_on(value, quantum_at(value, FP16_BITS))
        gap = abs(value - self.last)
        self.last = value
        if gap == 0.0:
            self.ties += 1
        elif self.least == 0.0 or gap < self.least:
            self.least = gap if gap == gap else 0.0

    def quantum(self, value: float) -> float:
        """Return the grid's step at `value`, 0.0 while no grid is proved."""
        if self.seen >= SURE_VALUES:
            if self.bf16 >= ON_GRID * self.seen:
                return quantum_at(value, BF16_BITS)
            if self.fp16 >= ON_GRID * self.seen:
                return quantum_at(value, FP16_BITS)
        if self.seen >= TIED_VALUES and self.ties >= TIED * self.seen:
            return self.least
        return 0.0


def _lies_on(value: float, quantum: float) -> bool:
    """Whether a printed number lies on a grid that is coarser than the printing."""
    return quantum > 4 * PRINTED and abs(value - round(value / quantum) * quantum) <= PRINTED
