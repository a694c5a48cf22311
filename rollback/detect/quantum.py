"""Sense the number format behind a logged series: bf16 and fp16 values lie on a coarse grid.

The 80B run of the seed logged a bf16 loss: between 1 and 2 its quantum is 2^-7 = 0.0078, two thirds of its noise.
A median absolute deviation over such values is 0 or 1 quantum, so every scale needs the quantum as a floor.
"""

from __future__ import annotations

import math

BF16_BITS = 7
FP16_BITS = 10
PRINT_TOLERANCE = 6e-5  # four printed decimals
SHARE_ON_GRID = 0.98
MIN_VALUES = 64


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
    """Count how many values of a series lie on the bf16 or fp16 grid; a fold with three integers of state."""

    __slots__ = ("bf16", "fp16", "seen")

    def __init__(self, seen: int = 0, bf16: int = 0, fp16: int = 0) -> None:
        self.seen, self.bf16, self.fp16 = seen, bf16, fp16

    def feed(self, value: float) -> None:
        self.seen += 1
        self.bf16 += is_on_grid(value, BF16_BITS)
        self.fp16 += is_on_grid(value, FP16_BITS)

    def quantum(self, value: float) -> float:
        """Return the grid's step at `value`, 0.0 while no grid is proved."""
        if self.seen < MIN_VALUES:
            return 0.0
        for count, bits in ((self.bf16, BF16_BITS), (self.fp16, FP16_BITS)):
            if count >= SHARE_ON_GRID * self.seen:
                return quantum_at(value, bits)
        return 0.0
