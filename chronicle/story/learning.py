"""Is it still learning? The lineage's loss with spikes masked: rolling median, slope, plateau, and too few values. Pure.

The seed's authors saw "no improvement for almost 8k iterations" by eye, on a loss that printed 11 distinct bf16 values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from chronicle.story.assemble import LOSS_NAMES, Story
from chronicle.story.series import LaunchSeries

__all__ = ["Progress", "canonical", "tell_progress"]

BINS = 240
SPIKE_SIGMAS = 5.0
NORMAL_MAD = 1.4826
COARSE_VALUES = 24  # distinct values among the last COARSE_POINTS: bf16 near 1.7 has a step of 1/128
COARSE_POINTS = 1000
PLATEAU_FRACTION = 0.25  # of the run's steps
LEAST_BINS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`steps`, `medians`: the masked rolling median. Slopes are per 1000 steps, over the last quarter of the run."""

    steps: tuple[int, ...] = ()
    medians: tuple[float, ...] = ()
    masked_points: int = 0
    slope_per_1000: float | None = None
    slope_error: float | None = None
    plateau: bool = False
    distinct_values: int | None = None  # only when there are suspiciously few


def canonical(story: Story, series: Sequence[LaunchSeries], channel: str) -> tuple[list[int], list[float]]:
    """The one honest curve: every step once, from the launch that the weights descend from."""
    by_launch = {s.launch: s.channels for s in series}
    steps: list[int] = []
    values: list[float] = []
    for interval in story.lineage.kept:
        curve = by_launch.get(interval.launch, {}).get(channel)
        if curve is not None:
            part = curve.between(interval.first, interval.last)
            steps += part.steps
            values += part.values
    return steps, values


def tell_progress(story: Story, series: Sequence[LaunchSeries]) -> Progress:
    """Nothing is claimed from fewer than twelve bins."""
    name = next((n for n in LOSS_NAMES if any(n in s.channels for s in series)), None)
    if name is None:
        return Progress()
    steps, values = canonical(story, series, name)
    rows = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
    width = max(1, math.ceil(len(rows) / BINS))
    bins = [rows[i : i + width] for i in range(0, len(rows), width)]
    masked = [_masked(part) for part in bins]
    centres = tuple(part[len(part) // 2][0] for part in bins)
    medians = tuple(median(kept) for kept, _ in masked)
    tail = max(LEAST_BINS, int(len(bins) * PLATEAU_FRACTION))
    slope, error = _slope(centres[-tail:], medians[-tail:])
    last = [v for _, v in rows[-COARSE_POINTS:]]
    distinct = len(set(last))
    return Progress(
        steps=centres,
        medians=medians,
        masked_points=sum(count for _, count in masked),
        slope_per_1000=None if slope is None else 1000 * slope,
        slope_error=None if error is None else 1000 * error,
        plateau=slope is not None and error is not None and len(bins) >= 2 * LEAST_BINS and slope > -2 * error,
        distinct_values=distinct if len(last) >= 200 and distinct <= COARSE_VALUES else None,
    )


def _masked(part: Sequence[tuple[int, float]]) -> tuple[list[float], int]:
    values = [v for _, v in part]
    middle = median(values)
    scale = NORMAL_MAD * median(abs(v - middle) for v in values)
    kept = [v for v in values if scale == 0 or v - middle <= SPIKE_SIGMAS * scale]
    return kept, len(values) - len(kept)


def _slope(steps: Sequence[int], values: Sequence[float]) -> tuple[float | None, float | None]:
    """Least squares and its standard error."""
    count = len(steps)
    if count < LEAST_BINS:
        return None, None
    mean_x, mean_y = sum(steps) / count, sum(values) / count
    spread = sum((x - mean_x) ** 2 for x in steps)
    if spread == 0:
        return None, None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(steps, values, strict=True)) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(steps, values, strict=True))
    return slope, math.sqrt(rest / (count - 2) / spread)
