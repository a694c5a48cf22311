"""One open event on one channel: the reference it is judged against, its onset, its peak and the recovery test.

"Back under the threshold" is not recovery: a run can settle at a permanently worse level (Marin 32B went 1.96, 2.02,
1.975 and was lost). Recovered means equivalent: the upper 95 % bound of the mean residual against the reference from
before the event lies below a margin. Between the margin and two noise units it is partial; above that, or rising, it is
diverging. The onset is a change point found by profile likelihood.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rollback.detect.config import ChannelConfig
from rollback.detect.events import Status

WINDOWS = (32, 64, 128, 200)  # points over which the recovery test takes its mean
DECILES_TO_SIGMA = 2.563  # between the tenth and the ninetieth per cent of a Gaussian
UPPER_95 = 1.645
RISING_99 = 2.33
CHECK_EVERY = 8  # points
EXPLODED_DECADES = 1.0  # a norm ten times its usual size
SCATTER_POINTS, SCATTER_MOST = 24, 128  # points that show whether the lower values rose
SCATTER_RISE = 0.4  # of the mean: in a real rise the lowest tenth rises as far as the mean
SCATTER_LOW, SCATTER_WIDE = 0.7, 1.25  # or it hardly rises at all, in noise that is wide also for one that wanders
SCATTER_SKEW = 2.0  # spikes on a raised middle are a run that is ill: in another order of the data both sides widen
SCATTER_STILL = 1.75  # times these two once it was seen: the lower values must have risen with the mean
SCATTER_GROWTH = 1.15  # of the noise: less is the run's usual noise
BACK, AGAIN, RETURNS = 1.5, 4.0, 3  # of one point's noise; so often high again: batches of several sorts, not one spike
BACK_POINTS, BACK_HIGH, BACK_MEAN = 12, 3.0, 0.5  # points after a sudden rise, all but one below; their mean
CLIP = 4.0  # one point counts as at most so far below the reference


@dataclass(slots=True, kw_only=True)
class ChannelEvent:
    """What one channel knows about one event; changed in place while it is open, read by the fusion.

    `level` is the reference it is judged against and `sigma` its noise, both in the channel's own unit (log10 for
    norms). `wander` and `inflation` tell how far the series drifts by itself, the latter as its long-run variance over
    the variance of one point. `unresolved`: it did not recover in time. A `respike` happened on top of another event.
    """

    id: int
    channel: str
    shape: str  # instant, gradual, nan, drop or too-good
    alarm_row: int
    alarm_step: int
    onset_row: int
    onset_step: int
    onset_low_row: int
    onset_low_step: int
    level: float
    sigma: float
    inflation: float = 1.0
    wander: float = 0.0  # how far block means drifted before, in units of sigma
    status: Status = Status.OPEN
    peak_row: int | None = None
    peak_step: int | None = None
    recovered_row: int | None = None
    recovered_step: int | None = None
    excess: float | None = None
    sigmas: float | None = None
    closed: bool = False
    lasting: bool = False  # still far from the reference after 32 points
    unresolved: bool = False
    height: float = 0.0  # mean excess of the last points when it was last judged
    crest: float = 0.0  # the highest it was
    decades: bool = False  # the channel's unit is log10
    scattered: bool = False  # the noise grew and the lower values stand: the order of the data changed
    overlaps: bool = False  # partial, and a tenth of its last points is as low as the level before it
    persistent: bool = False  # sudden, and still there after four points
    respike: bool = False
    local: bool = False  # judged against the fast level: its unit is the noise of one point
    after_restart: bool = False
    provisional: bool = False  # told by the noise of another log interval
    confirmed: bool = False  # by that of its own
    strays: bool = False  # slow rises of this run have come back by themselves, not long ago
    young: bool = False  # it began before the channel's level was known

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        record = {name: getattr(self, name) for name in self.__slots__}
        record["status"] = self.status.value
        return record

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> ChannelEvent:
        """Rebuild an event from `to_json`."""
        return cls(**{**record, "status": Status(record["status"])})


class Excursion:
    """Follow one open event; `feed` returns True when something about it changed."""

    __slots__ = ("back", "config", "count", "event", "margin", "own", "point", "recent", "reference", "spread", "top", "unit")

    def __init__(self, config: ChannelConfig, event: ChannelEvent, reference: float, unit: float) -> None:
        self.config, self.event, self.reference = config, event, reference
        self.unit = unit  # noise of one point, already widened for correlation
        self.spread = math.sqrt(math.sqrt(event.inflation))  # standard error of a mean of n: spread / sqrt(n), in units
        self.point = 1.0 if event.local else 1.0 / self.spread  # noise of one point, in units
        share = config.high_fraction / 2.0 if event.provisional else config.level_fraction  # its reference is a few points
        level = 0.0 if config.log else share * abs(reference)
        self.margin = max(config.equivalence * self.spread, level / unit)
        self.own = config.wanders * event.wander  # a rise must be larger than that to be proposed soon
        self.top = max(8.0, 1.5 * self.own)  # one point counts as at most so far above
        self.count = 0
        self.back = False  # a sudden rise is over as far as a few points can tell: what rises now is another event
        self.recent: deque[tuple[int, int, float]] = deque(maxlen=WINDOWS[-1])

    def feed(self, row: int, step: int, value: float) -> bool:
        """Fold one point; True when something about the event changed."""
        event = self.event
        residual = (value - self.reference) / self.unit
        self.recent.append((row, step, -CLIP if residual < -CLIP else self.top if residual > self.top else residual))
        self.count += 1
        exploded = False
        if event.excess is None or value - self.reference > event.excess:
            exploded = event.decades and (event.excess or 0.0) < EXPLODED_DECADES <= value - self.reference
            event.excess, event.peak_row, event.peak_step = value - self.reference, row, step
            event.sigmas = residual
        elif not self.back and event.shape == "instant" and self.count > BACK_POINTS:
            last = [item[2] for item in islice(reversed(self.recent), BACK_POINTS)]
            calm = sum(z < BACK_HIGH * self.point for z in last) >= BACK_POINTS - 1
            self.back = calm and math.fsum(last) / BACK_POINTS < max(self.margin, BACK_MEAN * self.spread)
        judged = self.count % CHECK_EVERY == 0 and self.judge()
        return judged or exploded

    def end_before(self, row: int) -> None:
        """The rise was over before this row, at which another event begins."""
        while self.recent[-1][0] >= row and len(self.recent) > 1:
            self.recent.pop()
        self.event.status, self.event.closed = Status.RECOVERED, True
        self.event.recovered_row, self.event.recovered_step = self._return_point()

    def judge(self) -> bool:
        """Apply the equivalence test and the milestones to the points so far; True when the event changed."""
        event, config = self.event, self.config
        residuals = [item[2] for item in self.recent]
        event.height = self._mean(residuals, 32) * self.unit
        event.crest = max(event.crest, event.height)
        changed = self._note_scatter(residuals)
        if self._is_recovered(residuals):
            event.status, event.closed = Status.RECOVERED, True
            event.recovered_row, event.recovered_step = self._return_point()
            return True
        if not event.lasting and 32 <= self.count < 64 and self._mean(residuals, 24) > 2.0 * self.margin:
            event.lasting = changed = True
        if not event.unresolved and self._is_unresolved(residuals):
            event.unresolved = changed = True
        if self.count >= config.verdict_points:
            status = self._verdict(residuals)
            changed = changed or status is not event.status
            event.status = status
            changed |= self._note_overlap(residuals)
        if self.count >= config.accept_points:
            event.closed = changed = True
            if event.status is Status.OPEN:  # no bound shows it, but the mean is back
                event.status = Status.RECOVERED
                event.recovered_row, event.recovered_step = self._return_point()
        return changed

    def _note_scatter(self, residuals: list[float]) -> bool:
        """Note whether the noise has grown around lower values that stand; True when that is new."""
        known = self.event.scattered
        if len(residuals) < SCATTER_POINTS or (self.event.shape != "gradual" and not self._comes_and_goes(residuals)):
            return False
        ordered = sorted(residuals[-SCATTER_MOST:])
        size = len(ordered)
        point = self.point
        wide = (ordered[(9 * size) // 10] - ordered[size // 10]) / DECILES_TO_SIGMA
        rise = ordered[size // 10] + 0.5 * DECILES_TO_SIGMA * point
        mean = math.fsum(ordered) / size
        least, share = (SCATTER_LOW, SCATTER_RISE) if not known else (SCATTER_STILL * SCATTER_LOW, SCATTER_STILL * SCATTER_RISE)
        stands = ordered[size // 10] < least and wide > SCATTER_WIDE * (1.0 if self.event.local else self.spread)
        middle = ordered[size // 2]
        spiky = ordered[(9 * size) // 10] - middle > SCATTER_SKEW * (middle - ordered[size // 10]) and middle > SCATTER_LOW
        grown = stands or (wide > SCATTER_GROWTH * point and rise < share * mean)
        self.event.scattered = grown and not spiky
        return self.event.scattered is not known

    def _note_overlap(self, residuals: list[float]) -> bool:
        """Note whether usual values are still seen in a level that is higher; True when that is new."""
        known = self.event.overlaps
        self.event.overlaps = self.event.status is Status.PARTIAL and sorted(residuals)[len(residuals) // 10] < 0.0
        return self.event.overlaps is not known

    def _comes_and_goes(self, residuals: list[float]) -> bool:
        """Whether the values were back at the reference several times and high again: no spike that decays does that."""
        high, returns = True, 0
        for value in residuals:
            if high and value < BACK * self.point:
                high = False
            elif not high and value > AGAIN * self.point:
                high, returns = True, returns + 1
        return returns >= RETURNS

    def finish(self) -> bool:
        """Give the event its verdict at the end of the log: no later point will. True when it changed.

        High and not falling is a divergence, back among the usual values is recovered, all else is partial.
        """
        event = self.event
        residuals = [item[2] for item in self.recent]
        size = min(len(residuals), 32)
        if event.unresolved and event.status is not Status.OPEN:
            return False
        mean = self._mean(residuals, size)
        high = mean > max(2.0 * self.spread, self.own * self.event.local)
        if event.unresolved or (size >= 12 and high and not event.scattered and not self._is_falling(residuals, size)):
            event.unresolved, event.status = True, Status.DIVERGING
        elif event.status is Status.OPEN:
            last = self._mean(residuals, min(size, 4))
            back = last < max(self.margin, 2.0 * self.spread) and self.count > 1
            event.status = Status.RECOVERED if back else Status.PARTIAL
            self._note_overlap(residuals)
            if back:
                event.recovered_row, event.recovered_step = self._return_point()
        else:
            return False
        return True

    def _is_recovered(self, residuals: list[float]) -> bool:
        for size in WINDOWS:
            if len(residuals) < size:
                return False
            if self._mean(residuals, size) + UPPER_95 * self.spread / math.sqrt(size) < self.margin:
                return True
        return False

    def _is_unresolved(self, residuals: list[float]) -> bool:
        config = self.config
        own = self.own
        if self.event.scattered:
            return False
        if self.count >= config.unresolved_points:
            stayed = self.count >= config.stayed_points and self._mean(residuals, 200) > 0.6 * own
            mean = self._mean(residuals, 50)
            least = mean - UPPER_95 * self.spread / math.sqrt(50)
            return (mean > own or stayed) and least > max(self.margin, 0.6 * self.spread)
        if self.event.shape != "gradual" or self.count < config.plain_points:
            return False
        size, height = (24, 4.0) if self.count < config.preview_points else (32, 2.0)
        return self._mean(residuals, size) > max(own, height * self.spread) and not self._is_falling(residuals, size)

    def _verdict(self, residuals: list[float]) -> Status:
        """Return partial or diverging. Diverging has hysteresis: it holds until the mean is clearly lower."""
        mean = self._mean(residuals, 200)
        if mean < self.margin:
            return Status.OPEN
        if self._is_diverging(residuals):
            return Status.DIVERGING
        stays = self.event.status is Status.DIVERGING and mean > 1.2 * self.spread
        return Status.DIVERGING if stays else Status.PARTIAL

    def _is_diverging(self, residuals: list[float]) -> bool:
        size = min(100, len(residuals)) // 2
        rise = self._mean(residuals, size) - self._mean(residuals[: len(residuals) - size], size)
        rising = rise > RISING_99 * self.spread * math.sqrt(2.0 / size)
        return rising or self._mean(residuals, 200) > 2.0 * self.spread

    def _is_falling(self, residuals: list[float], size: int) -> bool:
        half = size // 2
        drop = self._mean(residuals[: len(residuals) - half], half) - self._mean(residuals, half)
        return drop > RISING_99 * self.spread * math.sqrt(2.0 / half)

    @staticmethod
    def _mean(residuals: list[float], size: int) -> float:
        return math.fsum(residuals[-size:]) / min(size, len(residuals))

    def _return_point(self) -> tuple[int, int]:
        """Return row and step of the first of the ordinary points that the event ends with."""
        row, step, _ = self.recent[-1]
        strange = 0
        for item in reversed(self.recent):
            strange = strange + 1 if item[2] > 3.0 else 0
            if item[0] <= (self.event.peak_row or 0) or strange >= 2:
                break
            if not strange:
                row, step = item[0], item[1]
        return row, step

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; the event is named by its number."""
        return {
            "event": self.event.id, "reference": self.reference, "unit": self.unit, "count": self.count, "back": self.back,
            "recent": [list(item) for item in self.recent],
        }  # fmt: skip

    @classmethod
    def from_json(cls, config: ChannelConfig, event: ChannelEvent, record: dict[str, Any]) -> Excursion:
        """Rebuild an excursion around its event."""
        excursion = cls(config, event, record["reference"], record["unit"])
        excursion.count, excursion.back = record["count"], record["back"]
        excursion.recent.extend((row, step, value) for row, step, value in record["recent"])
        return excursion


# --- Onset: profile likelihood over the change point

# Two models compete for every candidate start: a step (the mean jumps and stays) and a ramp (it grows from zero). For
# residuals z in units of their own noise the log-likelihood gains over "nothing happened" are
# G_step = (sum z)^2 / 2n and G_ramp = (sum z_i i)^2 / 2 sum i^2 over the tail of n points. The estimate maximises the
# larger one. A start within 3.32 of the maximum (half the 99 % point of chi-square with one degree of freedom,
# Hinkley 1970) may be the true one too; the earliest of those is the lower bound.

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
