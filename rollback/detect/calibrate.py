"""How correlated a run's own healthy noise is, as far as a CUSUM can tell: block bootstrap of its residuals.

Slow wander (data order, curricula, averaging) makes sums of residuals grow faster than independent noise would, on
scales that a variance of short blocks does not see. So blocks of the run's own residuals are strung together at
random, the CUSUM is run over them, and the inflation is raised until false alarms would be rare enough. Blocks keep
the correlation (Künsch 1989); the maxima of segments follow a Gumbel law, which is extrapolated to the wanted rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCK_POINTS = 192
WANDER_POINTS = 48
SEGMENT_POINTS = 384
SEGMENTS = 16
TARGET_POINTS = 300_000  # one false alarm in so many points
STEPS = 1.5  # the ladder of inflations that are tried
GUMBEL_SCALE = math.sqrt(6.0) / math.pi
EULER = 0.5772


def find_wander(residuals: Sequence[float]) -> float:
    """How far the mean of a block strayed from the others, at most, while nothing was wrong; 0.0 with too little history.

    A rise that is no larger than what the run has done by itself proves nothing, however significant it looks. Blocks
    count from the first that reaches the middle: in the early descent all lie far below their slow reference.
    """
    if len(residuals) < 8 * WANDER_POINTS // 2:
        return 0.0
    values = list(residuals)
    starts = range(0, len(values) - WANDER_POINTS + 1, WANDER_POINTS // 2)
    means = [math.fsum(values[start : start + WANDER_POINTS]) / WANDER_POINTS for start in starts]
    middle = sorted(means)[len(means) // 2]
    settled = next(index for index, mean in enumerate(means) if mean >= middle)
    return max(abs(mean - middle) for mean in means[settled:])


class Dice:
    """A small linear congruential generator (Knuth's MMIX constants): pure modules have no `random`, and it replays."""

    def __init__(self, seed: int) -> None:
        self.state = (seed * 2862933555777941757 + 3037000493) & 0xFFFFFFFFFFFFFFFF

    def below(self, limit: int) -> int:
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        return (self.state >> 33) % limit


def calibrate_inflation(
    residuals: Sequence[float], inflation: float, *, height: float, slack: float, limit: float
) -> float:
    """Return the smallest inflation >= the given one at which the CUSUM is quiet on the run's own residuals.

    `residuals` are in units of the noise of one point, in order. A level that wanders is centred block by block only
    as far as the reference would follow it: not at all, which is the cautious side.
    """
    if len(residuals) < 2 * BLOCK_POINTS:
        return inflation
    residuals = list(residuals)
    dice = Dice(len(residuals))
    segments = [_segment(residuals, dice) for _ in range(SEGMENTS)]
    while inflation < limit:
        unit = math.sqrt(math.sqrt(inflation))
        if _expected_height(segments, unit, slack) <= height * math.sqrt(inflation):
            break
        inflation *= STEPS
    return min(inflation, limit)


def _segment(residuals: Sequence[float], dice: Dice) -> list[float]:
    drawn: list[float] = []
    while len(drawn) < SEGMENT_POINTS:
        start = dice.below(len(residuals) - BLOCK_POINTS + 1)
        drawn.extend(residuals[start : start + BLOCK_POINTS])
    return drawn


def _expected_height(segments: Sequence[Sequence[float]], unit: float, slack: float) -> float:
    """The level that a CUSUM over this noise passes once in TARGET_POINTS points."""
    peaks = []
    for segment in segments:
        cusum = peak = 0.0
        for residual in segment:
            z = residual / unit
            cusum += (-4.0 if z < -4.0 else 4.0 if z > 4.0 else z) - slack
            if cusum < 0.0:
                cusum = 0.0
            elif cusum > peak:
                peak = cusum
        peaks.append(peak)
    mean = math.fsum(peaks) / len(peaks)
    spread = math.sqrt(math.fsum((peak - mean) ** 2 for peak in peaks) / (len(peaks) - 1))
    scale = GUMBEL_SCALE * spread
    return mean - EULER * scale + scale * math.log(TARGET_POINTS / SEGMENT_POINTS)
