"""Processes one logged series point by point: one rule for what is sudden, one for what is slow.

*Sudden*: a value is compared with a fast level and the quartiles of the last residuals. The threshold follows the tail
of the run's own noise (peaks over threshold, Siffer 2017), so that hard batches do not alarm for ever; a rise by a fifth
of the level needs less. The tail is learnt from points outside events and from outliers of one point. *Slow*: clipped
residuals against the lower of a slow level and a lagged middle one are summed (Page 1954). Suspicion freezes these
levels, so that a ramp cannot become its own baseline, and the long-run variance of the series raises the threshold.
While an event is open, everything it is judged by is frozen (`life.py`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

from rollback.detect.constants import (
    BLOCK_POINTS,
    CLIP,
    CUSUM_HEIGHT,
    CUSUM_SLACK,
    DECADES_FLOOR,
    DOUBT,
    FAST_GAIN,
    HEAVY_TAIL,
    HIGH_RISE,
    LAG_POINTS,
    LEVEL_FLOOR,
    MAJOR_ODDS,
        MAJOR_RISE,
    MIDDLE_POINTS,
    NOISE_POINTS,
    NON_FINITE_POINTS,
    OFTEN_POINTS,
    OFTEN_SPIKES,
    RECORD,
    SLOW_POINTS,
    SUDDEN_LEAST,
    SUDDEN_MOST,
    SUSPICION,
    TAIL_GAIN,
    TAIL_LEAST,
    TAIL_ODDS,
    TAIL_SHARE,
    USUAL_POINTS,
    WARM_POINTS,
    YOUNG_POINTS,
)
from rollback.detect.events import Status
from rollback.detect.grid import Grid
from rollback.detect.life import PERSISTENT_POINTS, ChannelEvent, Life
from rollback.detect.onset import find_onset

IQR_TO_SIGMA = 0.7413  # of a Gaussian
BUFFER_POINTS = 512
LAG_EVERY = 16  # points between two remembered levels
LEAST_SIGMA = 1e-100  # a loss of exactly zero has no noise: its square must still be a number
LEAST_VALUE = 1e-12  # below it the logarithm is taken of this
FAR_BACK = -(10**9)  # a row before every log


class Channel:
    """The fold of one series; what a point opened or changed stands in `changed` until it is taken.

    With `log` the values are folded in decades, with `falling` a fall is the incident.
    """

    def __init__(self, name: str = "", *, log: bool = False, falling: bool = False) -> None:
        self.name, self.log, self.falling = name, log, falling
        self.rows = self.age = 0  # points seen, and since the present levels began
        self.last_step: int | None = None
        self.grid, self.quantum = Grid(), 0.0
        # sudden
        self.level = self.scale = 0.0  # scale: the noise of one point, slowly
        self.order: deque[float] = deque()  # the last residuals, and the same sorted
        self.ordered: list[float] = []
        self.tail_start, self.tail_mean = 1.645, 0.7  # units of noise; a Gaussian's 95 % point, and a mean excess
        self.high = self.lone = 0.0  # by how much the last point rose, and its z, where it was or may be a spike
        self.often = self.often_top = 0.0  # separate high points lately, and the height of the highest
        self.often_run, self.often_row, self.said_often = 0, FAR_BACK, False
        self.spike: ChannelEvent | None = None  # the last one told
        # slow
        self.slow = self.middle = 0.0
        self.lagged: deque[float] = deque(maxlen=LAG_POINTS // LAG_EVERY)
        self.cusum, self.cusum_row = 0.0, -1
        self.inflation = self.root = self.widening = (
            1.0  # long-run over one point's variance, its square and fourth root
        )
        self.long_run = 0.0
        self.blocks, self.block_sum, self.block_size, self.block_1, self.block_2 = 0, 0.0, 0, 0.0, 0.0
        self.drifts: deque[float] = deque(maxlen=BLOCK_POINTS)  # of block means from the slow level
        self.strayed = 0.0  # the highest slow rise that came back by itself
        # events
        self.buffer: deque[tuple[int, int, float, float]] = deque(maxlen=BUFFER_POINTS)  # row, step, value, deviation
        self.history: deque[tuple[int, float, float, float]] = deque(maxlen=BUFFER_POINTS)  # step, level, middle, slow
        self.life: Life | None = None
        self.respike: ChannelEvent | None = None
        self.not_a_number: ChannelEvent | None = None
        self.changed: list[ChannelEvent] = []  # opened or changed, till the engine takes them
        self.non_finite = 0  # points in a row
        self.last_end = self.last_hot = self.restart_row = self.interval_row = FAR_BACK

    # --- One point

    def feed(self, row: int, step: int, raw: float) -> None:
        """Fold one value; rows and steps are the log's own."""
        if raw - raw != 0.0:  # NaN or infinite
            self._feed_non_finite(row, step)
            return
        if self.non_finite:
            self._end_non_finite(row, step)
        value = self._in_units(raw) if self.log or self.falling else raw
        self.last_step = step
        self.rows += 1
        self.age += 1
        if self.rows <= MIDDLE_POINTS or self.rows % USUAL_POINTS == 0:
            self.grid.feed(raw)
            self.quantum = 0.0 if self.log else self.grid.quantum()
        if self.age <= WARM_POINTS:
            self._warm_up(row, step, value)
            return
        # the local noise
        ordered = self.ordered
        size = len(ordered)
        centre = ordered[size >> 1]
        sigma = (ordered[(3 * size) >> 2] - ordered[size >> 2]) * IQR_TO_SIGMA
        if self.log or self.quantum or sigma <= LEVEL_FLOOR * abs(self.level) or sigma < LEAST_SIGMA:
            sigma = self._floored(sigma)
        shift = value - self.level - centre
        usual = sigma
        if self.scale > sigma and self.age > NOISE_POINTS:
            usual = math.sqrt(sigma * self.scale)
        z = shift / usual
        sudden = self._is_sudden(shift, z, sigma, ordered[-1] - centre, size)
        if z > SUDDEN_LEAST and self._is_often(shift, row):
            return
        # the fast level
        limit = HIGH_RISE * sigma
        residual = value - self.level
        fell = shift < -2.0 * limit
        jumped = fell and row - self.interval_row <= WARM_POINTS  # the first points of another log interval
        if jumped:
            shift /= FAST_GAIN
        elif fell:
            shift = -2.0 * limit
        elif shift > limit:
            shift = limit
        self.level += (shift + centre) * FAST_GAIN
        if not sudden and not jumped:  # a jump is no noise
            self.order.append(residual)
            insort(ordered, residual)
            if size >= NOISE_POINTS:
                del ordered[bisect_left(ordered, self.order.popleft())]
        self._feed_slow(row, step, value, sudden, z, sigma)

    def _in_units(self, raw: float) -> float:
        value = math.log10(max(raw, LEAST_VALUE)) if self.log else raw
        return -value if self.falling else value

    def _floored(self, sigma: float) -> float:
        """The noise, not below what the numbers can show."""
        floor = DECADES_FLOOR if self.log else LEVEL_FLOOR * abs(self.level)
        return max(sigma, floor, 0.75 * self.quantum, LEAST_SIGMA)

    # --- Sudden

    def _threshold(self, size: int) -> float:
        """The z from which a point is sudden: by the tail of the run's own noise, wider while few residuals are known."""
        threshold = self.tail_start + TAIL_ODDS * self.tail_mean
        threshold = min(SUDDEN_MOST, max(SUDDEN_LEAST, threshold))
        return threshold if size >= NOISE_POINTS else threshold * (1.0 + WARM_POINTS / size)

    def _is_sudden(self, shift: float, z: float, sigma: float, top: float, size: int) -> bool:
        """Whether a point is a spike: far beyond the tail of the run's own noise, and no neighbour half as high.

        `top` is the highest of the last residuals. A rise of a fifth of the level is told sooner, because a person calls
        it major; a smaller one of these must stay up for a second point.
        """
        before, lone = self.high, self.lone
        self.high = self.lone = 0.0
        if before and 2 * shift >= before and shift >= HIGH_RISE * sigma:
            self.high = before
            return True
        if lone:  # it was one point, and is noise of the run; one that lasts is an event
            self._learn_tail(lone)
        rises = shift >= RECORD * top
        if rises and z >= self._threshold(size):
            self.high, self.lone = shift, z
            return True
        if self.life is not None:
            return False
        if self.log or not rises or shift < MAJOR_RISE * abs(self.level):
            self._learn_tail(z)
            return False
        odds = (shift / sigma - self.tail_start) / self.tail_mean
        if odds >= MAJOR_ODDS - 2:
            self.high = shift
        self.lone = z
        return odds >= MAJOR_ODDS and self.tail_mean < HEAVY_TAIL

    def _learn_tail(self, z: float) -> None:
        """Follow the beginning and the mean excess of the tail; one outlier counts as at most three mean excesses."""
        if z > self.tail_start:
            excess = min(z - self.tail_start, HIGH_RISE * self.tail_mean)
            self.tail_start += TAIL_GAIN * (1.0 - TAIL_SHARE)
            self.tail_mean += CLIP * TAIL_GAIN * (excess - self.tail_mean)
        elif self.tail_start > TAIL_LEAST:
            self.tail_start -= TAIL_GAIN * TAIL_SHARE

    def _is_often(self, height: float, row: int) -> bool:
        """Whether a high point is noise of this run: others as high began again and again, and the level came back.

        Batches of two sorts (with and without mixup) do that for the whole run. A series of spikes does not: it begins
        seldom, or stays, or rises above what was there.
        """
        gap = self.rows - self.often_row
        kept = math.exp(-gap / OFTEN_POINTS)
        self.often_row = self.rows
        self.often_run = 1 if gap > 1 else self.often_run + 1
        self.often = self.often * kept + (gap > 1)
        limit = RECORD * self.often_top
        self.often_top = max(self.often_top * kept, min(height, limit or height))
        if self.often < OFTEN_SPIKES or height > limit or self.often_run >= 2 * WARM_POINTS:
            return False
        spike = self.spike
        if spike is not None and not self.said_often and row - spike.alarm_row < OFTEN_POINTS:
            self.said_often, spike.often = True, round(self.often)
            self.changed.append(spike)
        return True

    # --- Slow

    def _feed_slow(self, row: int, step: int, value: float, sudden: bool, z: float, sigma: float) -> None:
        """Sum the excess over the slow reference; open an event, follow an open one, or learn from a healthy point."""
        if self.life is not None:
            self.buffer.append((row, step, value, 0.0))
            self._follow(row, step, value, sudden, z, sigma)
            return
        reference = self.slow
        if self.lagged and self.lagged[0] < reference and self.age >= 2 * MIDDLE_POINTS:
            reference = self.lagged[0]
        unit = self.scale * self.widening
        deviation = (value - reference) / unit
        self.buffer.append((row, step, value, deviation))
        cusum = self.cusum - CUSUM_SLACK
        if deviation > CLIP:
            cusum += CLIP
        else:
            cusum += deviation if deviation > -CLIP else -CLIP
        if self.age < BUFFER_POINTS:
            cusum -= DOUBT / math.sqrt(self.age)
        if cusum <= 0.0:
            cusum = 0.0
        elif self.cusum == 0.0:
            self.cusum_row = row
        self.cusum = cusum
        height = CUSUM_HEIGHT * self.root
        if self.age < BUFFER_POINTS:
            height *= 1.0 + YOUNG_POINTS / self.age
        if sudden or cusum >= height:
            self._open(row, step, value, sudden, z, sigma, reference, unit)
        elif cusum <= height * SUSPICION or self.age < MIDDLE_POINTS:
            self._learn(step, value, unit, sigma)

    def _learn(self, step: int, value: float, unit: float, sigma: float) -> None:
        """Move the slow levels and the scale by one healthy point."""
        age = self.age
        self.scale += (sigma - self.scale) / MIDDLE_POINTS
        limit = HIGH_RISE * unit
        to_slow, to_middle = value - self.slow, value - self.middle
        if to_slow > limit:
            to_slow = limit
        if to_middle > limit:
            to_middle = limit
        self.slow += to_slow / min(age, SLOW_POINTS // 2)  # the plain mean until the span is filled
        self.middle += to_middle / min(age, MIDDLE_POINTS // 2)
        self.block_sum += value if to_middle > -limit else self.middle
        self.block_size += 1
        if age % LAG_EVERY:
            return
        self.lagged.append(self.middle)
        self.history.append((step, self.level, self.middle, self.slow))
        if self.block_size >= BLOCK_POINTS:
            self._end_block()

    def _end_block(self) -> None:
        """Measure the long-run variance by second differences of block means, which do not see a linear trend."""
        mean = self.block_sum / self.block_size
        if self.age >= 2 * MIDDLE_POINTS:
            self.drifts.append((mean - min(self.slow, self.lagged[0])) / self.scale)
        if self.blocks >= 2:
            bend = mean - 2.0 * self.block_1 + self.block_2
            power = bend * bend * self.block_size / 6.0
            own = self.scale * self.scale
            prior = self.long_run if self.long_run > 0.0 else 1.5 * own
            if self.long_run > 0.0:
                power = min(power, LAG_EVERY * self.long_run)
            self.long_run = prior + max(1.0 / 24.0, 1.0 / (self.blocks + 1.0)) * (power - prior)
            self._inflate(min(64.0, max(1.0, self.long_run / own)))
        self.block_2, self.block_1 = self.block_1, mean
        self.blocks += 1
        self.block_sum, self.block_size = 0.0, 0

    def _inflate(self, inflation: float) -> None:
        self.inflation, self.root = inflation, math.sqrt(inflation)
        self.widening = math.sqrt(self.root)

    def _own_drift(self) -> float:
        """How far block means have drifted from their median while nothing was wrong, in the channel's unit.

        A rise that is no larger proves nothing. Blocks count from the first that reaches the median: in the early descent
        all lie far below their slow level.
        """
        if len(self.drifts) < 4:
            return self.strayed
        means = list(self.drifts)
        middle = sorted(means)[len(means) // 2]
        settled = next(index for index, mean in enumerate(means) if mean >= middle)
        return max(self.strayed, *(abs(mean - middle) * self.scale for mean in means[settled:]))

    # --- Start

    def _warm_up(self, row: int, step: int, value: float) -> None:
        """Run the fast level through the first points and take its residuals as the first noise."""
        self.buffer.append((row, step, value, 0.0))
        if self.age < WARM_POINTS:
            return
        first = self._last(WARM_POINTS)
        self.level = sorted(first[:5])[2]
        residuals = []
        for known in first:
            residuals.append(known - self.level)
            self.level += FAST_GAIN * residuals[-1]
        self._know(residuals[WARM_POINTS // 4 :])
        self.scale = self._floored(self._spread())
        tail = first[WARM_POINTS // 2 :]
        self.middle = self.slow = sum(tail) / len(tail)
        self._inflate(1.5)
        self.blocks, self.block_sum, self.block_size, self.cusum, self.last_end = 0, 0.0, 0, 0.0, row

    def _last(self, count: int) -> list[float]:
        return [item[2] for item in list(self.buffer)[-count:]]

    def _know(self, residuals: list[float]) -> None:
        self.order, self.ordered = deque(residuals), sorted(residuals)

    def _spread(self) -> float:
        ordered, size = self.ordered, len(self.ordered)
        return (ordered[(3 * size) >> 2] - ordered[size >> 2]) * IQR_TO_SIGMA

    def begin_segment(self, row: int, step: int, *, new_interval: bool, rewound: bool, denser: float = 1.0) -> None:
        """A launch begins with the next point, or the log interval changed.

        `denser` is the old interval over the new one: the mean of n independent steps has the noise of one over the root
        of n. A norm has no usual size at another interval and starts anew. Where the steps go back, an open event ends with
        them, and the next point is judged by the levels that were known at its step when it was logged before.
        """
        if rewound or (new_interval and self.log):
            self._abandon(row, step if rewound else None)
        if not new_interval:
            self.restart_row = row
            return
        self.interval_row = row
        if self.log:
            self.age = 0
            self.lagged.clear()
            self.buffer.clear()
        elif self.age > WARM_POINTS:
            wider = math.sqrt(max(1.0, denser))
            self._know([wider * residual for residual in self.order])
            self.scale *= wider

    # --- Events

    def _new_event(self, shape: str, row: int, step: int, level: float, sigma: float) -> ChannelEvent:
        event = ChannelEvent()
        event.channel, event.shape, event.level, event.sigma = self.name, shape, level, sigma
        event.alarm_row = event.onset_row = event.onset_low_row = row
        event.alarm_step = event.onset_step = event.onset_low_step = step
        event.decades = self.log
        event.after_restart = row - self.restart_row <= 60
        event.provisional = row - self.interval_row < WARM_POINTS
        self.changed.append(event)
        if shape == "instant":
            self.spike = event
        return event

    def _open(
        self, row: int, step: int, value: float, sudden: bool, z: float, sigma: float, reference: float, unit: float
    ) -> None:
        """Open the event of an alarm: find its onset and its reference, and decide whether it is sudden."""
        start = (self.cusum_row if self.cusum > 0.0 else row) - MIDDLE_POINTS
        tail = [item for item in self.buffer if item[0] >= max(start, self.last_end)] or [self.buffer[-1]]
        best, earliest = find_onset([item[3] for item in tail], inflation=self.root)
        onset, low = tail[best], tail[earliest]
        late = row - onset[0]
        if late > WARM_POINTS:  # growth by e-folds spends as long again below the noise
            wanted = max(low[0] - late, self.last_end, self.restart_row)
            low = next((item for item in self.buffer if item[0] >= wanted), low)
        local = sudden and value - reference < HIGH_RISE * unit
        inflation = self.inflation
        if local:  # sudden against the fast level only: the slow reference is higher, in the early descent
            before = sorted(self._last(USUAL_POINTS + 1)[:-1])
            reference, unit = before[len(before) // 2], sigma
            if reference >= value:  # it falls so steeply that the level of half a window ago is above the spike
                reference = value - z * sigma
            onset = low = tail[-1]
            inflation = max(1.0, min(64.0, (self.scale * self.root / sigma) ** 4))
        shape = "instant" if sudden and row - onset[0] <= WARM_POINTS + 2 else "gradual"
        event = self._new_event(shape, row, step, reference, unit)
        event.onset_row, event.onset_step, event.onset_low_row, event.onset_low_step = *onset[:2], *low[:2]
        event.wander, event.inflation, event.local = self._own_drift() / unit, inflation, local
        event.young = self.age - late < MIDDLE_POINTS
        self.life, self.last_hot, self.cusum = Life(event, self.log), row, 0.0
        self.life.feed(row, step, value)

    def _follow(self, row: int, step: int, value: float, sudden: bool, z: float, sigma: float) -> None:
        """Fold one point while an event is open: a second spike on top of it, and the recovery test."""
        life = self.life
        assert life is not None
        if self.respike is not None:
            if self._follow_respike(row, step, value):
                self.changed.append(self.respike)
                self.respike = None
        elif sudden and row - self.last_hot > 6:
            self.respike = self._new_event("instant", row, step, value - z * sigma, sigma)
            self.respike.respike = True
            self._follow_respike(row, step, value)
        if sudden:
            self.last_hot = row
            event = life.event if self.respike is None else self.respike
            event.hot += 1
            if event.hot == PERSISTENT_POINTS and row - event.alarm_row <= WARM_POINTS:
                event.persistent = True
                self.changed.append(event)
        if life.feed(row, step, value):
            self.changed.append(life.event)
        if life.event.closed:
            self._close(row)

    def _follow_respike(self, row: int, step: int, value: float) -> bool:
        """Update the spike on top of the open event; True when it is over."""
        event = self.respike
        assert event is not None
        event.rise_to(row, step, value)
        age = row - event.alarm_row
        calm = sum(value - event.level < HIGH_RISE * event.sigma for value in self._last(WARM_POINTS))
        if age >= WARM_POINTS and calm >= WARM_POINTS - 1:
            event.end(Status.RECOVERED, row, step)
        elif age >= 2 * USUAL_POINTS:
            event.end(Status.PARTIAL)
        return event.closed

    def _close(self, row: int) -> None:
        """Leave the open event: the slow levels start again from the present one."""
        assert self.life is not None
        recent = sorted(self._last(MIDDLE_POINTS))
        present = recent[len(recent) // 2]
        event = self.life.event
        if event.status is Status.RECOVERED:
            present = min(present, self.slow)
            if event.shape == "gradual" and not event.after_restart:  # as far as that this run drifts by itself
                self.strayed = max(self.strayed, event.crest)
                self.long_run = 1.6 * self.inflation * self.scale * self.scale
                self._inflate(min(64.0, 1.6 * self.inflation))
        if self.age > WARM_POINTS:
            self.middle = self.slow = present
        self.life = None
        self.cusum, self.last_end = 0.0, row
        self.blocks, self.block_sum, self.block_size = 0, 0.0, 0
        self.lagged.clear()

    def _abandon(self, row: int, step: int | None) -> None:
        """Close the open events; where the log went back to `step`, restore the levels of then."""
        if self.respike is not None:
            self.respike.end(Status.PARTIAL)
            self.changed.append(self.respike)
        if self.life is not None:
            event = self.life.event
            event.closed = True
            if event.unresolved or event.lasting:
                event.status = Status.DIVERGING
            self.changed.append(event)
            self.level = self.middle = self.slow = self.life.reference
        self.life = self.respike = None
        if step is not None:
            while self.history and self.history[-1][0] >= step:
                self.history.pop()
            if self.history:
                _, self.level, self.middle, self.slow = self.history[-1]
        self.lagged.clear()
        self.cusum, self.last_end = 0.0, row

    def finish(self) -> None:
        """Judge the open events by their last points: the log is complete. Not part of the fold."""
        if self.not_a_number is not None:
            self._confirm(self.not_a_number)
            return
        if self.life is not None and self.life.finish():
            self.changed.append(self.life.event)
        if self.respike is not None:
            diverges = self.life is not None and self.life.event.unresolved
            self.respike.end(Status.DIVERGING if diverges else Status.PARTIAL)
            self.changed.append(self.respike)

    # --- Not a number

    def _feed_non_finite(self, row: int, step: int) -> None:
        """Fold a NaN or an infinity: the first opens an event, the third in a row confirms it."""
        self.non_finite += 1
        if self.not_a_number is None:
            event = self.not_a_number = self._new_event("nan", row, step, self.level, self.scale)
            event.peak_row, event.peak_step = row, step
        elif self.non_finite == NON_FINITE_POINTS:
            self._confirm(self.not_a_number)

    def _confirm(self, event: ChannelEvent) -> None:
        if not event.unresolved:
            event.unresolved, event.status = True, Status.DIVERGING
            self.changed.append(event)

    def _end_non_finite(self, row: int, step: int) -> None:
        """Close the NaN event: this point is a number again."""
        event, self.not_a_number, self.non_finite = self.not_a_number, None, 0
        assert event is not None
        event.end(Status.RECOVERED, row, step)
        self.changed.append(event)
