"""Rules of other tools, written anew from their descriptions, as functions from a loss series to alarm rows.

Each keeps what decides its behaviour (window, threshold, what enters the window), not its plumbing.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence


def window_sigma(series: Sequence[float], *, window: int, sigmas: float, least: int) -> Iterator[int]:
    """OLMo-core, MaxText, Levanter: above mean + 6 sigma of the last 128, outliers enter the window; or 7 of 1,000."""
    recent: deque[float] = deque(maxlen=window)
    for row, value in enumerate(series):
        if len(recent) >= least:
            mean = statistics.fmean(recent)
            spread = statistics.pstdev(recent, mean) if all(map(math.isfinite, recent)) else math.nan
            if not value - mean <= sigmas * spread:  # a NaN anywhere skips the step, as in the original
                yield row
        recent.append(value)


def kill_loss_spike(series: Sequence[float]) -> Iterator[int]:
    """llm-foundry: more than 4 points in a row at or above twice the mean of the last 100."""
    recent: deque[float] = deque(maxlen=100)
    streak = 0
    for row, value in enumerate(series):
        if len(recent) == 100:
            streak = streak + 1 if value >= 2 * statistics.fmean(recent) else 0
            if streak > 4:
                yield row
        recent.append(value)


def lightning(series: Sequence[float]) -> Iterator[int]:
    """Lightning: not finite, or above the last value and three times the running mean of ten."""
    mean = last = None
    for row, value in enumerate(series):
        if not math.isfinite(value):
            yield row
            continue
        if mean is not None and last is not None and value > last and abs(value - mean) >= 2 * abs(mean):
            yield row
        mean = value if mean is None else mean + (value - mean) / 10
        last = value


def robust_z(series: Sequence[float], *, window: int = 200, z: float = 6.0) -> Iterator[int]:
    """Median and MAD of the last 200 points (trainspotter-like), alarm at 6."""
    recent: deque[float] = deque(maxlen=window)
    for row, value in enumerate(series):
        if not math.isfinite(value):
            yield row
            continue
        if len(recent) >= 32:
            middle = statistics.median(recent)
            spread = 1.4826 * statistics.median(abs(x - middle) for x in recent)
            if value - middle > z * max(spread, 1e-9):
                yield row
        recent.append(value)


def local_robust_z(series: Sequence[float]) -> Iterator[int]:
    """The same over 32 points with a floor of 1 % of the level, alarm at 8."""
    recent: deque[float] = deque(maxlen=32)
    for row, value in enumerate(series):
        if not math.isfinite(value):
            yield row
            continue
        if len(recent) >= 24:
            middle = statistics.median(recent)
            spread = 1.4826 * statistics.median(abs(x - middle) for x in recent)
            if value - middle > 8.0 * max(spread, 0.01 * abs(middle)):
                yield row
        recent.append(value)


RULES: dict[str, Callable[[Sequence[float]], Iterator[int]]] = {
    "OLMo-core 6σ of 128": lambda s: window_sigma(s, window=128, sigmas=6.0, least=64),
    "spike score 7σ of 1000": lambda s: window_sigma(s, window=1000, sigmas=7.0, least=128),
    "llm-foundry 2× mean": kill_loss_spike,
    "Lightning 3× mean": lightning,
    "robust z 6 of 200": robust_z,
    "local robust z 8 of 32": local_robust_z,
}
