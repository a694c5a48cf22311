"""Processes one logged series point by point: a local baseline for sudden events, a slow CUSUM for gradual ones.

The *local* layer compares a value with a fast level and the quartiles of the last residuals: a robust z whose
threshold follows the tail of the run's own noise (peaks over threshold, Siffer 2017), so that a micro-batch loss with
hard batches does not alarm for ever. The tail is learnt from points outside events and from outliers of one point: a
spike that lasts must not raise the threshold for the next. A young series is judged from its ninth point on, by a
wider threshold, and by the leaps between its points, which no steep descent widens. The *slow* layer sums winsorised
residuals against the lower of a slow level and a lagged middle level (Page 1954). Suspicion freezes that reference,
so that a ramp cannot become its own baseline, and the long-run variance of the series raises the threshold. While an
event is open, everything it is judged by is frozen (`excursion.py`).

State is a few dozen floats and bounded lists, all plain JSON. `feed` calls four methods a point and no more: on half a
million points a Python call costs as much as the arithmetic of a small one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from itertools import pairwise

from rollback.detect.channel_events import (
    ChannelState,
    abandon_events,
    abandon_provisional,
    carry_over,
    close_non_finite,
    confirm_non_finite,
    end_provisional,
    end_returned,
    feed_drop,
    feed_non_finite,
    feed_open,
    feed_provisional,
    feed_restarted,
    non_finite_event,
    open_event,
)
from rollback.detect.events import Status
from rollback.detect.excursion import ChannelEvent
from rollback.detect.noise import IQR_TO_SIGMA, MAD_TO_SIGMA, calibrate_inflation

Changed = list[ChannelEvent] | None  # the events that a point opened or changed, mostly none


class Channel(ChannelState):
    """The fold of one series; `feed` returns the channel events that a point opened or changed."""

    __slots__ = ()

    def feed(self, row: int, step: int, raw: float) -> Changed:
        """Fold one value; rows and steps are the log's own. Returns the events changed by it, or None."""
        if raw - raw != 0.0:  # NaN or infinite
            return feed_non_finite(self, row, step)
        config = self.config
        value = self._in_decades(raw) if config.log else -raw if config.falling else raw
        changed = close_non_finite(self, row, step) if self.non_finite else None
        self.last_step = step
        self.rows += 1
        self.age += 1
        if self.rows <= config.grid_points or self.rows % config.grid_every == 0:
            self.grid.feed(raw)
            self.quantum = 0.0 if config.log else self.grid.quantum(raw)
        if not self.sorted:
            self.warm.append((row, step, value))
            if self.carried:
                changed = feed_provisional(self, row, step, value, changed)
            if len(self.warm) >= config.warm_points:
                ended = self._start()
                changed = [*(changed or ()), *ended] or None
            return changed
        level = self.level
        sudden, z, sigma = self._feed_local(value)
        if sudden is None:
            return changed
        if self.cold == config.drop_points:
            changed = feed_drop(self, row, step, value, level, changed)
        return self._feed_slow(row, step, value, sudden, z, sigma, changed)

    def begin_segment(
        self, row: int, step: int, *, new_interval: bool, rewound: bool, denser: float = 1.0
    ) -> list[ChannelEvent]:
        """A launch begins with the next point, or the log interval changed; the latter starts new baselines.

        `denser` is the old interval over the new one. Until the new baselines are known, the old ones judge
        (`feed_provisional`). Where the steps go back, an open event ends with them, and the next point is judged by the levels
        that were known at its step when it was logged before. Returns the events that this closed.
        """
        if not new_interval:
            self.restart_row = row
            self.before = self._descent()
            return abandon_events(self, row, step) if rewound else []
        closed = abandon_events(self, row, step) if self.config.log and self.excursion is not None else []
        if self.excursion is None:
            closed += abandon_provisional(self)
            carry_over(self, denser)
            self.sorted, self.warm, self.cusum, self.pairs, self.hot, self.age = [], [], 0.0, 0, 0, 0
            self.order.clear()
            self.lagged.clear()
            self.buffer.clear()
        return closed

    def finish(self) -> list[ChannelEvent]:
        """Judge the open event by its last points: the log is complete. Not part of the fold."""
        if self.non_finite and not non_finite_event(self).unresolved:
            return confirm_non_finite(self)
        excursion = self.excursion
        done = [excursion.event] if excursion is not None and excursion.finish() else []
        for event in self.respikes:
            event.status = Status.DIVERGING if excursion is not None and excursion.event.unresolved else Status.PARTIAL
        return [*done, *self.respikes, *abandon_provisional(self)]

    def _in_decades(self, raw: float) -> float:
        config = self.config
        value = math.log10(raw if raw > config.least_value else config.least_value)
        return -value if config.falling else value

    # --- Local layer

    def _feed_local(self, value: float) -> tuple[bool | None, float, float]:
        """Judge a value against the fast level; returns (sudden, robust z, local noise) and moves the level.

        Sudden is None where points as high as this one come all the time: neither layer folds it.
        """
        config, ordered, level = self.config, self.sorted, self.level
        residual = value - level
        size = len(ordered)
        centre = ordered[size >> 1]
        sigma = (ordered[(3 * size) >> 2] - ordered[size >> 2]) * IQR_TO_SIGMA
        floor = config.floor_fraction if config.log else config.floor_fraction * abs(level)
        if floor < config.quantum_fraction * self.quantum:
            floor = config.quantum_fraction * self.quantum
        if floor < config.least_scale:
            floor = config.least_scale
        if sigma < floor:
            sigma = floor
        shift = residual - centre
        usual = sigma if self.scale <= sigma or self.age <= config.sure_points else math.sqrt(sigma * self.scale)
        z = shift / usual
        sudden = self._is_sudden(z, size) or (z > 2.0 and self.age <= config.leap_until and self._leaps(value))
        if (shift > config.high_sigmas * sigma or self.high) and self._is_major(shift, sigma, ordered[-1] - centre):
            sudden = True
        if shift < -config.drop_sigmas * sigma:
            self.cold += 1
            if self.cold >= config.drop_points:
                level = value - centre  # an improvement that stays is followed at once
        else:
            self.cold = 0
        if z > config.odd_sigmas and self._is_usual(shift):
            return None, z, sigma
        if sudden:
            self.hot += 1
            if self.hot >= config.resettle_points:
                self._resettle()
                level, shift, centre = self.level, 0.0, 0.0
        else:
            self.hot = 0
            self.settled += 1
            self.order.append(residual)
            insort(ordered, residual)
            if size >= config.window_points:
                del ordered[bisect_left(ordered, self.order.popleft())]
        limit = config.step_sigmas * sigma
        bounded = -2.0 * limit if shift < -2.0 * limit else limit if shift > limit else shift
        self.level = level + (bounded + centre) * (2.0 / (config.fast_points + 1))
        return sudden, z, sigma

    def _is_sudden(self, z: float, size: int) -> bool:
        """Compare z with the threshold of the run's own tail, alone or with the two points before; learn the tail."""
        config = self.config
        threshold = self.tail_u + config.tail_log_odds * self.tail_beta
        if threshold < config.local_min:
            threshold = config.local_min
        elif threshold > config.local_max:
            threshold = config.local_max
        if size < config.window_points:
            threshold *= 1.0 + config.few_points / size
        near = z >= config.pair_fraction * threshold
        self.pairs = pairs = ((self.pairs << 1) | near) & 0b111
        if near:
            self.lone = z if pairs == 1 and self.excursion is None else 0.0
            return z >= threshold or (pairs & 0b110) != 0
        if self.lone:  # an outlier of one point is noise of the run, and bounded; one that lasts is an event
            excess, cap = self.lone - self.tail_u, config.tail_cap * self.tail_beta
            self.tail_beta += config.tail_gain * ((excess if excess < cap else cap) - self.tail_beta)
            self.lone = 0.0
        elif self.excursion is not None:
            return False
        if z > self.tail_u:
            self.tail_u += config.tail_up
            self.tail_beta += config.tail_gain * (z - self.tail_u - self.tail_beta)
        elif self.tail_u > config.tail_least:
            self.tail_u -= config.tail_down
        return False

    def _is_major(self, shift: float, sigma: float, top: float) -> bool:
        """Whether a rise of a fifth of the level is a spike though it is below the threshold: a person calls it major.

        It must be a record, `top` being the highest of the last residuals. Where the second point stays up, two points are
        told: of batches that are hard by chance there is one. One point is told in a run whose tail is an ordinary one, or
        whose slow noise is of another time, a steep start: the threshold, in units of both noises, is too high there.
        """
        config, level, sigmas = self.config, abs(self.level), shift / sigma
        before, self.high = self.high, 0.0
        if self.excursion is not None or shift < config.high_record * top or shift < config.high_fraction * level:
            stays = shift >= config.high_stays * max(before, config.high_fraction * level) and sigmas >= config.high_second
            return bool(before) and stays and self.excursion is None
        if sigmas >= max(config.high_sigmas, self.tail_u + config.high_pair_odds * self.tail_beta):
            self.high = shift
        ordinary = self.tail_beta < config.high_tail or self.scale > config.high_stale * sigma
        lone = shift >= config.high_lone * top and sigmas >= self.tail_u + config.high_log_odds * self.tail_beta
        return bool(before) or (ordinary and lone)

    def _is_usual(self, height: float) -> bool:
        """Whether a sudden point is noise of this run: others as high began again and again, and the level came back.

        Batches of two sorts (with and without mixup) do that for the whole run. A series of spikes does not: it begins
        seldom, or stays, or rises above what was there.
        """
        config = self.config
        gap = self.rows - self.odd_row
        kept = math.exp(-gap / config.odd_span)
        self.odd_points = self.odd_points * kept + 1.0
        self.odd = self.odd * kept + (gap > 1)
        self.odd_run = 1 if gap > 1 else self.odd_run + 1
        self.odd_row = self.rows
        top, limit = self.odd_top, config.odd_reach * self.odd_top
        self.odd_top = max(top * kept, height if top == 0.0 or height < limit else limit)
        if self.odd < config.odd_entries or height > limit:
            return False
        share = min(config.odd_most, self.odd_points / config.odd_span)
        return self.odd_run * math.log(share) > math.log(config.odd_chance)

    def _leaps(self, value: float) -> bool:
        """Whether a young series leaps: by far more than its last rises and falls, whose spread no steep descent widens."""
        config = self.config
        values = [item[3] for item in list(self.buffer)[-config.leap_points - 1 :]]
        leaps = sorted(later - earlier for earlier, later in pairwise(values))
        if len(leaps) < config.leap_points // 2:
            return False
        middle = leaps[len(leaps) // 2]
        spread = sorted(abs(leap - middle) for leap in leaps)[len(leaps) // 2] * MAD_TO_SIGMA
        least = config.floor_fraction if config.log else config.leap_fraction * abs(values[-1])
        return value - values[-1] - middle > config.leap_sigmas * max(spread, least, config.least_scale)

    def _resettle(self) -> None:
        """Learn a new local level from the last points: so many above the threshold in a row are no outliers.

        Without it the level climbs by two thirds of a noise unit a point: after a rise of 500 units and more the event
        closes before the level is there, and the same rise opens another.
        """
        values = [item[3] for item in list(self.buffer)[-self.config.resettle_from :]]
        middle = sorted(values)[len(values) // 2]
        spread = self.sorted[(3 * len(self.sorted)) >> 2] - self.sorted[len(self.sorted) >> 2]
        self.level = values[-1]
        deviations = [value - middle for value in values]
        self.order = deque([*deviations, -spread / 2, spread / 2])
        self.sorted = sorted(self.order)
        self.hot = self.settled = 0

    # --- Slow layer

    def _feed_slow(
        self, row: int, step: int, value: float, sudden: bool, z: float, sigma: float, changed: Changed
    ) -> Changed:
        """Sum the excess over the slow reference; open an event, follow an open one, or learn from a healthy point."""
        config, scale = self.config, self.scale
        unit = scale * self.widening
        reference, lagged = self.slow, self.lagged
        if self.age >= config.lag_from and lagged and lagged[0] < reference:
            reference = lagged[0]
        deviation = (value - reference) / unit
        self.buffer.append((row, step, deviation, value))
        if (excursion := self.excursion) is not None:
            if not excursion.back or excursion.event.lasting:
                return feed_open(self, row, step, value, sudden, z, sigma, changed)
            height = self._feed_cusum(row, deviation)
            if self.cusum < height and not (sudden and row - self.last_hot > config.sudden_points):
                return feed_open(self, row, step, value, sudden, z, sigma, changed)
            changed = end_returned(self, row, changed)
            if excursion.reference < reference:  # the level it came back to, in an early descent below the slow one
                reference, unit = excursion.reference, excursion.unit
            return open_event(self, row, step, value, sudden, z, sigma, reference, unit, changed)
        plain = (value - reference) / scale
        if self.age > config.sure_points:
            self.residuals.append(plain)
        height = self._feed_cusum(row, deviation)
        if sudden or self.cusum >= height:
            return open_event(self, row, step, value, sudden, z, sigma, reference, unit, changed)
        if self.cusum > height * config.suspicion and self.age >= config.suspicion_from:
            return changed
        return self._learn(row, step, value, plain, unit, sigma, changed)

    def _feed_cusum(self, row: int, deviation: float) -> float:
        """Add one deviation to the CUSUM; returns the height at which it alarms."""
        config, count, clip = self.config, self.age, self.config.cusum_clip
        cusum = self.cusum + (-clip if deviation < -clip else clip if deviation > clip else deviation) - config.cusum_slack
        if count < config.doubt_points:
            cusum -= config.doubt / math.sqrt(count)
        if cusum <= 0.0:
            cusum = 0.0
        elif self.cusum == 0.0:
            self.cusum_row = row
        self.cusum = cusum
        height = self.height * self.root
        if count < config.young[-1][0]:
            height *= next(factor for points, factor in config.young if count < points)
        return height

    def _learn(
        self, row: int, step: int, value: float, plain: float, unit: float, sigma: float, changed: Changed
    ) -> Changed:
        """Move the slow levels and the scale by one healthy point."""
        config, count = self.config, self.age
        size = -plain if plain < 0.0 else plain
        cap = config.marginal_cap * self.marginal
        self.marginal += ((size if size < cap else cap) * config.marginal_factor - self.marginal) * config.marginal_gain
        self.scale += (sigma - self.scale) * config.scale_gain
        limit = config.step_units * unit
        gain = 1.0 / count  # the plain mean until the span is filled
        slow_gain, middle_gain = self.gains
        to_slow = value - self.slow
        self.slow += (limit if to_slow > limit else to_slow) * (gain if gain > slow_gain else slow_gain)
        to_middle = value - self.middle
        if to_middle > limit:
            to_middle = limit
        self.middle += to_middle * (gain if gain > middle_gain else middle_gain)
        self.block_sum += value if -limit < to_middle < limit else self.middle
        self.block_size += 1
        if count % config.lag_every == 0:
            self.lagged.append(self.middle)
            self.history.append((step, self.level, self.middle, self.slow))
            if self.block_size >= config.block_points:
                self._end_block()
            if row - self.restart_row <= config.too_good_points + config.lag_every:
                changed = feed_restarted(self, row, step, changed)
        return changed

    # --- Start, wander, descent

    def _start(self) -> list[ChannelEvent]:
        """Leave warm-up: run the fast level through the first points and take its residuals as the window.

        Points that were called high are no part of it, while there are as many others. Returns the event that told them.
        """
        config = self.config
        values = [item[2] for item in self.warm if item[0] not in self.told]
        if len(values) < len(self.warm) // 2:
            values = [item[2] for item in self.warm]
        gain = 2.0 / (config.fast_points + 1)
        head = sorted(values[:5])
        self.level = head[len(head) // 2]
        residuals = []
        for value in values:
            residuals.append(value - self.level)
            self.level += gain * residuals[-1]
        kept = residuals[len(residuals) // 4 :]
        self.order = deque(kept)
        self.sorted = sorted(kept)
        size = len(kept)
        sigma = (self.sorted[(3 * size) >> 2] - self.sorted[size >> 2]) * IQR_TO_SIGMA
        floor = config.floor_fraction * (1.0 if config.log else abs(self.level))
        self.scale = max(sigma, floor, config.least_scale)
        tail = values[len(values) // 2 :]
        self.middle = self.slow = sum(tail) / len(tail)
        self.set_inflation(config.first_inflation)
        self.blocks, self.block_sum, self.block_size = 0, 0.0, 0
        self.buffer.extend((row, step, 0.0, value) for row, step, value in self.warm)
        told = end_provisional(self)
        self.warm, self.told = [], []
        return told

    def _end_block(self) -> None:
        """Measure the long-run variance by second differences of block means, which do not see a linear trend."""
        config = self.config
        mean = self.block_sum / self.block_size
        if self.blocks >= 2:
            bend = mean - 2.0 * self.block_1 + self.block_2
            power = bend * bend * self.block_size / 6.0
            if self.long_run > 0.0 and power > config.block_cap * self.long_run:
                power = config.block_cap * self.long_run
            weight = max(config.block_gain, 1.0 / (self.blocks + 1.0))
            prior = self.long_run if self.long_run > 0.0 else config.first_inflation * self.scale * self.scale
            self.long_run = prior + weight * (power - prior)
            ratio = self.long_run / (self.scale * self.scale)
            self.set_inflation(max(self.wander, min(config.max_inflation, ratio)))
            self.healthy += self.block_size
            if self.healthy >= self.next_calibration:
                self._calibrate()
        self.block_2, self.block_1 = self.block_1, mean
        self.blocks += 1
        self.block_sum, self.block_size = 0.0, 0

    def _calibrate(self) -> None:
        """Measure on a geometric schedule how much wander the run's own healthy residuals hold."""
        config = self.config
        self.next_calibration = min(2 * self.healthy, self.healthy + config.recalibrate_points)
        self.wander = calibrate_inflation(
            self.residuals, self.wander, height=config.cusum_height, slack=config.cusum_slack, limit=config.max_inflation
        )
        self.set_inflation(max(self.inflation, self.wander))

    def _descent(self) -> tuple[float, float] | None:
        """The level of the last 64 points and by how much it fell over the 256 before; None with less history."""
        values = [item[3] for item in list(self.buffer)[-320:]]
        if len(values) < 320 or self.excursion is not None:
            return None
        late, early = sorted(values[-64:])[32], sorted(values[:64])[32]
        return late, max(0.0, early - late)
