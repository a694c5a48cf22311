"""Whole curves: every channel of every launch as columns, read once; and their thinning for pictures.

Thinning keeps, of each group of neighbouring points, the first, lowest, highest and last (M4, Jugel et al. 2014): a spike
of one step survives any reduction. Pure Python: `render --check` runs where no numpy is.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from chronicle.metrics import read_metrics
from chronicle.paths import RunPaths

__all__ = ["Curve", "LaunchSeries", "read_series", "robust_range", "shown_range", "smooth", "thin"]

ROOM_FOR_ABANDONED = 0.6  # of the kept range


@dataclass(frozen=True, slots=True)
class Curve:
    """One channel of one launch. `steps`, `times` (seconds since the epoch or None) and `values` have one length."""

    steps: list[int] = field(default_factory=list)
    times: list[float | None] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def between(self, first: int, last: int) -> "Curve":
        """The points with `first <= step <= last`."""
        rows = [i for i, step in enumerate(self.steps) if first <= step <= last]
        return Curve([self.steps[i] for i in rows], [self.times[i] for i in rows], [self.values[i] for i in rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSeries:
    """All channels of one launch."""

    launch: int
    channels: dict[str, Curve]


def read_series(paths: RunPaths, launches: Iterable[int], only: Sequence[str] | None = None) -> list[LaunchSeries]:
    """The curves of these launches; a launch without a log has no channels."""
    return [LaunchSeries(launch=n, channels=_read(paths.metrics_path(n), only)) for n in launches]


def _read(path: Path, only: Sequence[str] | None) -> dict[str, Curve]:
    channels: dict[str, Curve] = {}
    try:
        for point in read_metrics(path):
            for name, value in point.values.items():
                if only is not None and name not in only:
                    continue
                curve = channels.get(name)
                if curve is None:
                    curve = channels[name] = Curve()
                curve.steps.append(point.step)
                curve.times.append(point.time)
                curve.values.append(value)
    except FileNotFoundError:
        pass  # a launch that died before its first step logged nothing
    return channels


def thin(curve: Curve, buckets: int) -> Curve:
    """At most four points a bucket; non-finite values are kept as gaps."""
    count = len(curve.steps)
    if count <= 4 * buckets:
        return curve
    rows: list[int] = []
    for bucket in range(buckets):
        low, high = bucket * count // buckets, (bucket + 1) * count // buckets
        rows += _corners(curve.values, low, high)
    return Curve([curve.steps[i] for i in rows], [curve.times[i] for i in rows], [curve.values[i] for i in rows])


def _corners(values: Sequence[float], low: int, high: int) -> list[int]:
    finite = [i for i in range(low, high) if math.isfinite(values[i])]
    if not finite:
        return [low]
    chosen = {low, high - 1, min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    chosen |= {i for i in range(low, high) if not math.isfinite(values[i])} if len(finite) < high - low <= 8 else set()
    return sorted(chosen)


def smooth(curve: Curve, bins: int, least_points: int) -> Curve:
    """Medians of neighbours, where there are enough points: noise must not hide the drift."""
    if len(curve.steps) < least_points or bins < 1 or not _is_noisy(curve.values):
        return Curve()
    width = max(8, len(curve.steps) // bins)
    rows = [slice(i, i + width) for i in range(0, len(curve.steps) - width + 1, width)]
    middles = [curve.steps[part.start + width // 2] for part in rows]
    return Curve(middles, [None] * len(rows), [median(curve.values[part]) for part in rows])


def _is_noisy(values: Sequence[float]) -> bool:
    """Whether it goes up and down: a schedule or a counter, which has steps and ramps, is shown as it is."""
    moves = [b - a for a, b in pairwise(values) if b != a]
    turns = sum(1 for a, b in pairwise(moves) if (a > 0) != (b > 0))
    return turns > len(values) // 8


def shown_range(kept: Sequence[float], abandoned: Iterable[float]) -> tuple[float, float]:
    """The kept part decides; what was abandoned gets room where it is near, and is clipped where it is far."""
    gone = sorted(v for v in abandoned if math.isfinite(v))
    low, high = robust_range(kept or gone)
    if not gone or not kept:
        return low, high
    room = ROOM_FOR_ABANDONED * (high - low)
    margin = 0.05 * (high - low)
    top, bottom = gone[round(0.98 * (len(gone) - 1))] + margin, gone[round(0.02 * (len(gone) - 1))] - margin
    return max(min(low, bottom), low - room), min(max(high, top), high + room)


def robust_range(
    values: Iterable[float], *, low: float = 0.005, high: float = 0.98, margin: float = 0.15
) -> tuple[float, float]:
    """Quantiles of the finite values, widened: a single 100.0 must not flatten the drift that matters."""
    finite = sorted(v for v in values if math.isfinite(v))
    if not finite:
        return 0.0, 1.0
    bottom, top = finite[int(low * (len(finite) - 1))], finite[round(high * (len(finite) - 1))]
    if top <= bottom:
        span = abs(top) or 1.0
        return bottom - 0.1 * span, top + 0.1 * span
    return bottom - margin * (top - bottom), top + margin * (top - bottom)
