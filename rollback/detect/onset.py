"""Where a rise began: the change point of a series of residuals, by profile likelihood.

Two models compete for every candidate start: a step (the mean jumps and stays) and a ramp (it grows from zero). For
residuals z in units of their own noise the log-likelihood gains over "nothing happened" are G_step = (sum z)^2 / 2n and
G_ramp = (sum z_i i)^2 / 2 sum i^2 over the tail of n points. The estimate maximises the larger one. A start within
3.32 of the maximum (half the 99 % point of chi-square with one degree of freedom, Hinkley 1970) may be the true one too;
the earliest of those is the lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence

CHI_SQUARE_HALF = 3.32
CLIP_LOW, CLIP_HIGH = -4.0, 12.0


def find_onset(residuals: Sequence[float], *, inflation: float = 1.0) -> tuple[int, int]:
    """Return the index where the excess at the end of `residuals` began, and the earliest index that may be it.

    Residuals are in units of their noise, at least one. `inflation` is the long-run variance over the variance of one
    point: correlated noise carries less evidence.
    """
    gains: list[float] = []
    total = moment = squares = 0.0
    for length, residual in enumerate(reversed(residuals), 1):
        total += min(CLIP_HIGH, max(CLIP_LOW, residual))
        moment += total  # adding a point in front moves every weight of the tail up by one
        squares += length * length
        gain = 0.0
        if total > 0.0:
            gain = total * total / (2.0 * length)
        if moment > 0.0:
            gain = max(gain, moment * moment / (2.0 * squares))
        gains.append(gain)
    gains.reverse()
    best = max(range(len(gains)), key=gains.__getitem__)
    floor = gains[best] - CHI_SQUARE_HALF * max(1.0, inflation)
    low = next(index for index, gain in enumerate(gains) if gain >= floor)
    return best, low
