"""The life of one event on one channel: open, lasting, unresolved, recovered or accepted.

"Back under the threshold" is not recovery: a run can settle at a permanently worse level (Marin 32B went 1.96, 2.02,
1.975 and was lost). Recovered means equivalent: the upper 95 % bound of the mean residual against the reference from
before the event lies below a margin; a spike is over when a dozen points are among the others. What stays is diverging where
it is proposed and two noise units high, else partial.
"""

from __future__ import annotations

import math
from collections import deque

from rollback.detect.constants import (
    ACCEPT_POINTS,
    CLIP,
    EQUIVALENT,
    HIGH_RISE,
    LEVEL_FLOOR,
    STAY_POINTS,
    USUAL_POINTS,
    WANDERS,
)
from rollback.detect.events import Status

WINDOWS = (32, 64, 128, 200)  # points over which the recovery test takes its mean
UPPER_95 = 1.645
CHECK_EVERY = 8  # points
CALM_POINTS = 12  # among the others, all but one: a spike is over
EARLY = ((64, 32, 2.0), (24, 24, 4.0))  # points of a gradual event, and so many last ones so high: it is proposed
PERSISTENT_POINTS = 4  # sudden ones at the beginning of an event
DECILE = 1.28  # noise units below the mean, of a Gaussian
LOW = 0.7  # units of noise: a tenth of the points that is no higher has not risen
EXPLODED_DECADES = 1.0  # a norm ten times its usual size


class ChannelEvent:
    """What one channel knows about one event; changed in place while it is open.

    `level` is the reference it is judged against and `sigma` its noise, both in the channel's own unit (log10 for
    norms). `wander` and `inflation` tell how far the series drifts by itself, the latter as its long-run variance over
    the variance of one point. `unresolved`: it did not recover in time. A `respike` happened on top of another event.
    """

    def __init__(self) -> None:
        self.channel, self.shape = "", "instant"  # instant, gradual or nan
        self.alarm_row = self.onset_row = self.onset_low_row = 0
        self.alarm_step = self.onset_step = self.onset_low_step = 0
        self.level = self.sigma = 0.0
        self.inflation, self.wander = 1.0, 0.0  # the latter in units of sigma
        self.status = Status.OPEN
        self.peak_row: int | None = None
        self.peak_step: int | None = None
        self.recovered_row: int | None = None
        self.recovered_step: int | None = None
        self.excess: float | None = None
        self.sigmas: float | None = None
        self.height = self.crest = 0.0  # mean excess of the last points when it was last judged, and the highest it was
        self.hot = 0  # sudden points
        self.often = 0  # how many spikes the run has in OFTEN_POINTS points, where that is its usual noise
        self.closed = self.lasting = self.unresolved = self.persistent = False
        self.scattered = False  # the noise grew and the lower values stand: the order of the data changed
        self.decades = self.respike = self.after_restart = False
        self.local = False  # judged against the fast level: its unit is the noise of one point
        self.provisional = False  # the log interval changed with it: what is logged may be another quantity
        self.young = False  # it began before the channel's level was known

    def rise_to(self, row: int, step: int, value: float) -> bool:
        """Note a new peak; False where it was higher before."""
        excess = value - self.level
        if self.excess is not None and excess <= self.excess:
            return False
        self.excess, self.sigmas = excess, excess / self.sigma
        self.peak_row, self.peak_step = row, step
        return True

    def end(self, status: Status, row: int | None = None, step: int | None = None) -> None:
        """Close the event."""
        self.status, self.closed = status, True
        self.recovered_row, self.recovered_step = row, step


class Life:
    """Follow one open event; `feed` returns True when something about it changed."""

    def __init__(self, event: ChannelEvent, log: bool) -> None:
        self.event = event
        self.log, self.reference = log, event.level
        self.unit = event.sigma or 1.0  # noise of one point, already widened for correlation
        self.spread = math.sqrt(math.sqrt(event.inflation))  # standard error of a mean of n: spread / sqrt(n), in units
        self.point = 1.0 if event.local else 1.0 / self.spread  # noise of one point, in units
        level = 0.0 if log else LEVEL_FLOOR * abs(self.reference)
        self.margin = max(EQUIVALENT * self.spread, level / self.unit)
        self.own = WANDERS * event.wander  # a rise must be larger than that to be proposed soon
        self.count = 0
        self.recent: deque[tuple[int, int, float]] = deque(maxlen=WINDOWS[-1])

    def feed(self, row: int, step: int, value: float) -> bool:
        """Fold one point; True when something about the event changed."""
        event = self.event
        residual = (value - self.reference) / self.unit
        self.recent.append((row, step, min(max(8.0, 1.5 * self.own), max(-CLIP, residual))))
        self.count += 1
        before = event.excess or 0.0
        exploded = False
        if event.rise_to(row, step, value):
            exploded = event.decades and before < EXPLODED_DECADES <= value - self.reference
        elif event.shape == "instant" and self._is_calm():
            self._recover()
            return True
        judged = self.count % CHECK_EVERY == 0 and self.judge()
        return judged or exploded

    def _is_calm(self) -> bool:
        """Whether the last dozen points are among the others, but for one."""
        if self.count <= CALM_POINTS or self.recent[-1][2] >= HIGH_RISE * self.point:
            return False
        last = [item[2] for item in list(self.recent)[-CALM_POINTS:]]
        calm = sum(value < HIGH_RISE * self.point for value in last)
        mean = math.fsum(last) / CALM_POINTS
        return calm >= CALM_POINTS - 1 and mean < max(self.margin, 0.5 * self.spread)

    def judge(self) -> bool:
        """Apply the equivalence test and the milestones to the points so far; True when the event changed."""
        event = self.event
        residuals = [item[2] for item in self.recent]
        event.height = _mean(residuals, USUAL_POINTS) * self.unit
        event.crest = max(event.crest, event.height)
        if self._is_recovered(residuals):
            self._recover()
            return True
        before = (event.scattered, event.lasting, event.unresolved, event.status)
        if self.count >= 24 and event.shape == "gradual":
            event.scattered = self._is_scattered(residuals)
        if self.count >= USUAL_POINTS and _mean(residuals, 24) > 2.0 * self.margin:
            event.lasting = True
        event.unresolved = event.unresolved or self._is_unresolved(residuals)
        if event.unresolved:
            low = self.count > WINDOWS[-1] and _mean(residuals, WINDOWS[-1]) < 2.0 * self.spread
            event.status = Status.PARTIAL if low else Status.DIVERGING
        if self.count < ACCEPT_POINTS:
            return before != (event.scattered, event.lasting, event.unresolved, event.status)
        if _mean(residuals, WINDOWS[-1]) < self.margin:  # no bound shows it, but the mean is back
            self._recover()
        else:
            event.end(event.status if event.unresolved else Status.PARTIAL)
        return True

    def finish(self) -> bool:
        """Give the event its verdict at the end of the log: no later point will. True when it changed.

        High is a divergence, back among the usual values is recovered, all else is partial.
        """
        event = self.event
        if event.unresolved:
            return False
        residuals = [item[2] for item in self.recent]
        size = min(len(residuals), USUAL_POINTS)
        least = max(2.0 * self.spread, self.own if event.local else 0.0)
        if size >= CALM_POINTS and _mean(residuals, size) > least and not event.scattered:
            event.unresolved, event.status = True, Status.DIVERGING
        elif _mean(residuals, min(size, 4)) < max(self.margin, 2.0 * self.spread) and self.count > 1:
            self._recover()
        else:
            event.status = Status.PARTIAL
        return True

    def _recover(self) -> None:
        """Close the event at the first of the ordinary points that it ends with."""
        row, step, _ = self.recent[-1]
        strange = 0
        for item in reversed(self.recent):
            strange = strange + 1 if item[2] > HIGH_RISE else 0
            if item[0] <= (self.event.peak_row or 0) or strange >= 2:
                break
            if not strange:
                row, step = item[0], item[1]
        self.event.end(Status.RECOVERED, row, step)

    def _is_recovered(self, residuals: list[float]) -> bool:
        sizes = [size for size in WINDOWS if size <= len(residuals)]
        return any(_mean(residuals, size) + UPPER_95 * self.spread / math.sqrt(size) < self.margin for size in sizes)

    def _is_scattered(self, residuals: list[float]) -> bool:
        """Whether the noise has grown around lower values that stand: in a real rise these rise as far as the mean.

        Spikes on a raised middle are a run that is ill: in another order of the data both sides widen.
        """
        ordered = sorted(residuals[-WINDOWS[2] :])
        size = len(ordered)
        low, middle, high = ordered[size // 10], ordered[size // 2], ordered[(9 * size) // 10]
        if high - middle > 2.0 * (middle - low) and middle > LOW:
            return False
        once = 1.75 if self.event.scattered else 1.0  # once it was seen, the lower values must have risen with the mean
        wide = (high - low) / (2.0 * DECILE)
        if low < once * LOW and wide > 1.25 * (1.0 if self.event.local else self.spread):
            return True
        rise = low + DECILE * self.point
        return wide > 1.15 * self.point and rise < once * 0.4 * math.fsum(ordered) / size

    def _is_unresolved(self, residuals: list[float]) -> bool:
        if self.event.scattered:
            return False
        if self.count >= STAY_POINTS:
            mean = _mean(residuals, 50)
            least = mean - UPPER_95 * self.spread / math.sqrt(50)
            return mean > self.own and least > max(self.margin, 0.6 * self.spread)
        if self.event.shape != "gradual":
            return False
        for points, size, height in EARLY:
            if self.count >= points and _mean(residuals, size) > max(self.own, height * self.spread):
                return True
        return False


def _mean(residuals: list[float], size: int) -> float:
    return math.fsum(residuals[-size:]) / min(size, len(residuals))
