"""Where an event began, with a lower confidence bound: profile likelihood over the change point.

Two models compete for every candidate start: a step (the mean jumps and stays) and a ramp (it grows from zero). For
residuals z in units of their own noise the log-likelihood gains over "nothing happened" are
G_step = (sum z)^2 / 2n and G_ramp = (sum z_i i)^2 / 2 sum i^2 over the tail of n points. The estimate maximises the
larger one; every start within 3.32 of the maximum (half the 99 % point of chi-square with one degree of freedom,
Hinkley 1970) may be the true one, and the earliest of those is the lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CHI_SQUARE_HALF = 3.32
CLIP_LOW, CLIP_HIGH = -4.0, 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Onset:
    """Indices into the residuals handed in; `is_step` says which of the two models explains them better."""

    index: int
    low_index: int
    is_step: bool


def find_onset(residuals: Sequence[float], *, inflation: float = 1.0) -> Onset:
    """Return the start of the excess at the end of `residuals` (units of their noise; at least one).

    `inflation` is the long-run variance over the variance of one point: correlated noise carries less evidence.
    """
    last = len(residuals) - 1
    gains: list[tuple[float, bool]] = []
    total = moment = squares = 0.0
    for length, index in enumerate(range(last, -1, -1), 1):
        z = min(CLIP_HIGH, max(CLIP_LOW, residuals[index]))
        total += z
        moment += total  # adding a point in front moves every weight of the tail up by one
        squares += length * length
        step = total * total / (2.0 * length) if total > 0.0 else 0.0
        ramp = moment * moment / (2.0 * squares) if moment > 0.0 else 0.0
        gains.append((max(step, ramp), step >= ramp))
    gains.reverse()
    best = max(range(len(gains)), key=lambda index: gains[index][0])
    floor = gains[best][0] - CHI_SQUARE_HALF * max(1.0, inflation)
    low = next(index for index, (gain, _) in enumerate(gains) if gain >= floor)
    return Onset(index=best, low_index=low, is_step=gains[best][1])
