"""The noise of one series: the rounding step of its numbers, and the correlation of neighbouring values.

`GridSense` finds the rounding of the logged values (bf16, fp16, printed decimals). `calibrate_inflation` estimates, by a
block bootstrap of healthy residuals, how much higher a CUSUM threshold must be than independent noise would need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

IQR_TO_SIGMA, MAD_TO_SIGMA = 0.7413, 1.4826  # of a Gaussian
BF16_BITS = 7
FP16_BITS = 10
FP16_SHARE = 1 / 8  # of the distance between two bf16 numbers
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


class GridSense:
    """Find the quantum of a series: its values lie on the bf16 or fp16 grid, or neighbours are equal too often.

    The 80B run of the seed logged a bf16 loss: between 1 and 2 its quantum is 2^-7 = 0.0078, two thirds of its noise,
    so every scale needs half the quantum as a floor. The second test finds other roundings (two printed decimals, the
    pixels of a plot): independent real numbers are never equal, so where a seventh of the neighbours are, the smallest
    difference seen is the quantum.
    """

    __slots__ = ("bf16", "fp16", "last", "least", "seen", "ties")

    def __init__(
        self, seen: int = 0, bf16: int = 0, fp16: int = 0, ties: int = 0, last: float = math.nan, least: float = 0.0
    ) -> None:
        self.seen, self.bf16, self.fp16 = seen, bf16, fp16
        self.ties, self.last, self.least = ties, last, least

    def feed(self, value: float) -> None:
        """Fold one finite value: a printed number that a format can hold, where its grid is coarser than the printing."""
        self.seen += 1
        quantum = quantum_at(value, BF16_BITS)
        if quantum > 4 * PRINT_TOLERANCE:
            self.bf16 += abs(value - round(value / quantum) * quantum) <= PRINT_TOLERANCE
            quantum *= FP16_SHARE
            if quantum > 4 * PRINT_TOLERANCE:
                self.fp16 += abs(value - round(value / quantum) * quantum) <= PRINT_TOLERANCE
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
        """Return the arguments that rebuild this sense."""
        return [self.seen, self.bf16, self.fp16, self.ties, self.last, self.least]


# --- Correlation: block bootstrap of the residuals

# Slow wander (data order, curricula, averaging) makes sums of residuals grow faster than independent noise would, on
# scales that a variance of short blocks does not see. So blocks of the run's own residuals are strung together at
# random, the CUSUM is run over them, and the inflation is raised until false alarms would be rare enough. Blocks keep
# the correlation (Künsch 1989); the maxima of segments follow a Gumbel law, which is extrapolated to the wanted rate.

BLOCK_POINTS = 192
WANDER_POINTS = 48
SEGMENT_POINTS = 384
SEGMENTS = 16
TARGET_POINTS = 300_000  # one false alarm in so many points
INFLATION_STEP = 1.5  # factor between two inflations that are tried
CUSUM_CLIP = 4.0  # as in the fold
GUMBEL_SCALE = math.sqrt(6.0) / math.pi
EULER = 0.5772


def find_wander(residuals: Sequence[float]) -> float:
    """Return how far block means differ from their median, at most, while nothing was wrong; 0.0 with too little history.

    A rise that is no larger than this drift proves nothing, however significant it looks. Blocks count from the first
    that reaches the median: in the early descent all lie far below their slow reference.
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
    """A linear congruential generator (Knuth's MMIX constants), seeded and repeatable; this package imports no `random`."""

    def __init__(self, seed: int) -> None:
        self.state = (seed * 2862933555777941757 + 3037000493) & 0xFFFFFFFFFFFFFFFF

    def below(self, limit: int) -> int:
        """Return the next number in [0, limit)."""
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        return (self.state >> 33) % limit


def calibrate_inflation(
    residuals: Sequence[float], inflation: float, *, height: float, slack: float, limit: float
) -> float:
    """Return the smallest inflation >= the given one at which the CUSUM raises no alarm on the run's own residuals.

    `residuals` are in units of the noise of one point, in order. Blocks are not centred, which is the cautious side.
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
        inflation *= INFLATION_STEP
    return min(inflation, limit)


def _segment(residuals: Sequence[float], dice: Dice) -> list[float]:
    drawn: list[float] = []
    while len(drawn) < SEGMENT_POINTS:
        start = dice.below(len(residuals) - BLOCK_POINTS + 1)
        drawn.extend(residuals[start : start + BLOCK_POINTS])
    return drawn


def _expected_height(segments: Sequence[Sequence[float]], unit: float, slack: float) -> float:
    """Return the level that a CUSUM over this noise passes once in TARGET_POINTS points."""
    peaks = []
    for segment in segments:
        cusum = peak = 0.0
        for residual in segment:
            z = residual / unit
            cusum += (-CUSUM_CLIP if z < -CUSUM_CLIP else CUSUM_CLIP if z > CUSUM_CLIP else z) - slack
            if cusum < 0.0:
                cusum = 0.0
            elif cusum > peak:
                peak = cusum
        peaks.append(peak)
    mean = math.fsum(peaks) / len(peaks)
    spread = math.sqrt(math.fsum((peak - mean) ** 2 for peak in peaks) / (len(peaks) - 1))
    scale = GUMBEL_SCALE * spread
    return mean - EULER * scale + scale * math.log(TARGET_POINTS / SEGMENT_POINTS)
