"""Rules of other tools, written anew from their descriptions, as functions from a loss series to alarm rows.

Each keeps what decides its behaviour (window, threshold, what enters the window), not its plumbing.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence


class Moments:
    """Mean and standard deviation of the last `size` values by running sums; a NaN inside makes both NaN."""

    def __init__(self, size: int) -> None:
        self.values: deque[float] = deque()
        self.size, self.total, self.squares, self.poison = size, 0.0, 0.0, 0

    def add(self, value: float) -> None:
        self.values.append(value)
        self._count(value, 1.0)
        if len(self.values) > self.size:
            self._count(self.values.popleft(), -1.0)

    def _count(self, value: float, sign: float) -> None:
        if math.isfinite(value) and abs(value) < 1e100:
            self.total += sign * value
            self.squares += sign * value * value
        else:
            self.poison += int(sign)

    def mean(self) -> float:
        return math.nan if self.poison else self.total / len(self.values)

    def spread(self) -> float:
        mean = self.mean()
        return math.nan if self.poison else math.sqrt(max(0.0, self.squares / len(self.values) - mean * mean))


def window_sigma(series: Sequence[float], *, window: int, sigmas: float, least: int) -> Iterator[int]:
    """OLMo-core, MaxText, Levanter: above mean + 6 sigma of the last 128, outliers enter the window; or 7 of 1,000."""
    recent = Moments(window)
    for row, value in enumerate(series):
        # a NaN anywhere in the window skips the step, as in the original
        if len(recent.values) >= least and not value - recent.mean() <= sigmas * recent.spread():
            yield row
        recent.add(value)


def kill_loss_spike(series: Sequence[float]) -> Iterator[int]:
    """llm-foundry: more than 4 points in a row at or above twice the mean of the last 100."""
    recent = Moments(100)
    streak = 0
    for row, value in enumerate(series):
        if len(recent.values) == 100:
            streak = streak + 1 if value >= 2 * recent.mean() else 0
            if streak > 4:
                yield row
        recent.add(value)


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


def window_median(series: Sequence[float], *, window: int, least: int, z: float, floor: float) -> Iterator[int]:
    """Median and MAD of the last points, alarm at z; the floor is a share of the level."""
    recent: deque[float] = deque()
    ordered: list[float] = []
    for row, value in enumerate(series):
        if not math.isfinite(value):
            yield row
            continue
        if len(ordered) >= least:
            middle = ordered[len(ordered) // 2]
            deviations = sorted([abs(x - middle) for x in ordered])
            spread = 1.4826 * deviations[len(deviations) // 2]
            if value - middle > z * max(spread, floor * abs(middle), 1e-9):
                yield row
        recent.append(value)
        insort(ordered, value)
        if len(recent) > window:
            del ordered[bisect_left(ordered, recent.popleft())]


RULES: dict[str, Callable[[Sequence[float]], Iterator[int]]] = {
    "OLMo-core 6σ of 128": lambda s: window_sigma(s, window=128, sigmas=6.0, least=64),
    "spike score 7σ of 1000": lambda s: window_sigma(s, window=1000, sigmas=7.0, least=128),
    "llm-foundry 2× mean": kill_loss_spike,
    "Lightning 3× mean": lightning,
    "robust z 6 of 200": lambda s: window_median(s, window=200, least=32, z=6.0, floor=0.0),
    "median + 8 MAD of 64": lambda s: window_median(s, window=64, least=8, z=8.0, floor=0.0),
    "local robust z 8 of 32": lambda s: window_median(s, window=32, least=24, z=8.0, floor=0.01),
}
