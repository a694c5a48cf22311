"""One logged series folded point by point: a local baseline for sudden events, a slow one with a CUSUM for gradual ones.

The *local* layer compares a value with a fast level and the quartiles of the last 48 residuals: a robust z whose
threshold follows the tail of the run's own noise (peaks over threshold, Siffer 2017), so that a micro-batch loss with
hard batches does not alarm for ever. The *slow* layer sums winsorised residuals against the lower of a slow level and
a lagged middle level (Page 1954), freezes that reference on suspicion so that a ramp cannot become its own baseline,
and raises its threshold with the long-run variance of the series. While an event is open everything it is judged by
is frozen (`excursion.py`).

State is a few dozen floats and four bounded lists, all plain JSON. The hot path is one long method on purpose: a
Python call costs more than the arithmetic it would hold.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

from rollback.detect.channel_events import (
    ChannelState,
    abandon_events,
    close_non_finite,
    confirm_non_finite,
    feed_drop,
    feed_non_finite,
    feed_open,
    feed_restarted,
    non_finite_event,
    open_event,
)
from rollback.detect.excursion import ChannelEvent
from rollback.detect.noise import calibrate_inflation

IQR_TO_SIGMA = 0.7413
LEAST_SCALE = 1e-100  # a loss of exactly zero has no noise and no level: its square must still be a number


class Channel(ChannelState):
    """The fold of one series; `feed` returns the channel events that a point opened or changed, mostly none."""

    __slots__ = ()

    def feed(self, row: int, step: int, raw: float) -> list[ChannelEvent] | None:
        """Fold one value; rows and steps are the log's own. Returns the events changed by it, or None."""
        if raw - raw != 0.0:
            return feed_non_finite(self, row, step)
        config = self.config
        value = raw
        if config.log:
            value = math.log10(raw) if raw > 1e-12 else -12.0
            if config.falling:
                value = -value
        changed = close_non_finite(self, row, step) if self.non_finite else None
        self.last_step = step
        count = self.rows = self.rows + 1
        if count <= 256 or not count & 31:
            self.grid.feed(raw)
            self.quantum = 0.0 if config.log else self.grid.quantum(raw)
        ordered = self.sorted
        if not ordered:
            self.warm.append((row, step, value))
            if len(self.warm) >= config.warm_points:
                self._start()
            return changed

        # local layer: robust z of the residual against the fast level
        level = self.level
        residual = value - level
        size = len(ordered)
        centre = ordered[size >> 1]
        sigma = (ordered[(3 * size) >> 2] - ordered[size >> 2]) * IQR_TO_SIGMA
        floor = config.floor_fraction if config.log else config.floor_fraction * abs(level)
        if floor < 0.5 * self.quantum:
            floor = 0.5 * self.quantum
        if floor < LEAST_SCALE:
            floor = LEAST_SCALE
        if sigma < floor:
            sigma = floor
        shift = residual - centre
        z = shift / sigma
        threshold = self.tail_u + config.tail_log_odds * self.tail_beta
        if threshold < config.local_min:
            threshold = config.local_min
        elif threshold > config.local_max:
            threshold = config.local_max
        sudden = False
        near = z >= config.pair_fraction * threshold
        self.pairs = pairs = ((self.pairs << 1) | near) & 7
        if near:
            sudden = z >= threshold or (pairs & 6) != 0
            if self.hot == 0 and self.excursion is None:  # an outlier is learnt once, and bounded
                excess, top = z - self.tail_u, 3.0 * self.tail_beta
                self.tail_beta += 0.04 * ((excess if excess < top else top) - self.tail_beta)
        elif z > self.tail_u:
            self.tail_u += 0.0095
            self.tail_beta += 0.04 * (z - self.tail_u - self.tail_beta)
        elif self.tail_u > 1.2:
            self.tail_u -= 0.0005
        if shift < -6.0 * sigma:
            self.cold += 1
            if self.cold >= 4:
                if self.cold == 4:
                    changed = feed_drop(self, row, step, value, level, changed)
                self.level = level = value - centre  # an improvement that stays is followed at once
        else:
            self.cold = 0
        if sudden:
            self.hot += 1
            if self.hot >= 16:
                self._resettle()
                level, shift, centre = self.level, 0.0, 0.0
        else:
            self.hot = 0
            self.settled += 1
            order = self.order
            order.append(residual)
            insort(ordered, residual)
            if size >= config.window_points:
                del ordered[bisect_left(ordered, order.popleft())]
        limit = 3.0 * sigma
        bounded = -2.0 * limit if shift < -2.0 * limit else limit if shift > limit else shift
        self.level = level + (bounded + centre) * (2.0 / (config.fast_points + 1))

        # slow layer: winsorised CUSUM against a reference that suspicion freezes
        scale = self.scale
        unit = scale * self.widening
        reference = self.slow
        lagged = self.lagged
        if count >= 192 and lagged and lagged[0] < reference:
            reference = lagged[0]
        deviation = (value - reference) / unit
        self.buffer.append((row, step, deviation, value))
        excursion = self.excursion
        if excursion is not None:
            return feed_open(self, row, step, value, sudden, z, sigma, changed)
        plain = (value - reference) / scale
        self.residuals.append(plain)
        if plain > config.far_marginals * self.marginal:
            self.far += 1
            if self.far >= 3 and not sudden:
                sudden = True
        else:
            self.far = 0
        clipped = -4.0 if deviation < -4.0 else 4.0 if deviation > 4.0 else deviation
        cusum = self.cusum + clipped - config.cusum_slack
        if count < 512:  # the reference is itself an estimate
            cusum -= 1.5 / math.sqrt(count)
        if cusum <= 0.0:
            cusum = 0.0
        elif self.cusum == 0.0:
            self.cusum_row = row
        self.cusum = cusum
        height = self.height * self.root
        if count < 600:
            height *= 1.5 if count >= 192 else 2.0 if count >= 64 else 3.0
        if sudden or cusum >= height:
            return open_event(self, row, step, value, sudden, z, sigma, reference, unit, changed)
        if cusum > height * 0.34 and self.frozen < config.freeze_points and count >= 96:
            self.frozen += 1
            return changed
        if cusum <= height * 0.34:
            self.frozen = 0
        size_of = -plain if plain < 0.0 else plain
        limit = 4.0 * self.marginal
        self.marginal += ((size_of if size_of < limit else limit) * 1.25 - self.marginal) * 0.01
        self.scale = scale + (sigma - scale) * (1.0 / 96.0)
        limit = 3.0 * unit
        step_slow = value - self.slow
        if step_slow > limit:
            step_slow = limit
        gain = 1.0 / count
        slow_gain, middle_gain = self.gains
        self.slow += step_slow * (gain if gain > slow_gain else slow_gain)
        step_middle = value - self.middle
        if step_middle > limit:
            step_middle = limit
        self.middle += step_middle * (gain if gain > middle_gain else middle_gain)
        self.block_sum += value if -limit < step_middle < limit else self.middle
        self.block_size += 1
        if not count & 15:
            lagged.append(self.middle)
            self.history.append((step, self.level, self.middle, self.slow))
            if self.block_size >= config.block_points:
                self._end_block()
            if row - self.restart_row <= config.too_good_points + 16:
                changed = feed_restarted(self, row, step, changed)
        return changed

    def _calibrate(self) -> None:
        """On a geometric schedule: how much wander the run's own healthy residuals hold."""
        config = self.config
        self.next_calibration = min(2 * self.healthy, self.healthy + config.recalibrate_points)
        self.wander = calibrate_inflation(
            self.residuals, self.wander, height=config.cusum_height, slack=config.cusum_slack, limit=config.max_inflation
        )
        self.set_inflation(max(self.inflation, self.wander))

    def begin_segment(self, row: int, step: int, *, new_interval: bool, rewound: bool) -> list[ChannelEvent]:
        """A launch begins with the next point, or the log interval changed; the latter starts new baselines.

        Where the steps go back, an open event ends with them, and the next point is judged by the levels that were
        known at its step when it was logged before. Returns the events that this closed.
        """
        if not new_interval:
            self.restart_row = row
            self.before = self._descent()
            return abandon_events(self, row, step) if rewound else []
        elif self.excursion is None:
            self.sorted, self.warm, self.cusum, self.pairs, self.hot = [], [], 0.0, 0, 0
            self.order.clear()
            self.lagged.clear()
            self.buffer.clear()
        return []

    def _descent(self) -> tuple[float, float] | None:
        """The level of the last 64 points and by how much it fell over the 256 before; None with less history."""
        values = [item[3] for item in list(self.buffer)[-320:]]
        if len(values) < 320 or self.excursion is not None:
            return None
        late, early = sorted(values[-64:])[32], sorted(values[:64])[32]
        return late, max(0.0, early - late)

    def _start(self) -> None:
        """Leave warm-up: run the fast level through the first points and take its residuals as the window."""
        values = [item[2] for item in self.warm]
        gain = 2.0 / (self.config.fast_points + 1)
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
        floor = self.config.floor_fraction * (1.0 if self.config.log else abs(self.level))
        self.scale = max(sigma, floor, LEAST_SCALE)
        tail = values[len(values) // 2 :]
        self.middle = self.slow = sum(tail) / len(tail)
        self.set_inflation(1.5)
        self.blocks, self.block_sum, self.block_size = 0, 0.0, 0
        self.buffer.extend((row, step, 0.0, value) for row, step, value in self.warm)
        self.warm = []

    def _resettle(self) -> None:
        """Sixteen points above the threshold in a row are a new local level: learn it from themselves."""
        values = [item[3] for item in list(self.buffer)[-12:]]
        middle = sorted(values)[len(values) // 2]
        spread = self.sorted[(3 * len(self.sorted)) >> 2] - self.sorted[len(self.sorted) >> 2]
        self.level = values[-1]
        deviations = [value - middle for value in values]
        self.order = deque([*deviations, -spread / 2, spread / 2])
        self.sorted = sorted(self.order)
        self.hot = self.settled = 0

    def _end_block(self) -> None:
        """Second differences of block means measure the long-run variance without seeing a linear trend."""
        mean = self.block_sum / self.block_size
        if self.blocks >= 2:
            bend = mean - 2.0 * self.block_1 + self.block_2
            power = bend * bend * self.block_size / 6.0
            if self.long_run > 0.0 and power > 16.0 * self.long_run:
                power = 16.0 * self.long_run
            weight = max(1.0 / 24.0, 1.0 / (self.blocks + 1.0))
            prior = self.long_run if self.long_run > 0.0 else 1.5 * self.scale * self.scale
            self.long_run = prior + weight * (power - prior)
            ratio = self.long_run / (self.scale * self.scale)
            self.set_inflation(min(self.config.max_inflation, max(self.wander, ratio)))
            self.healthy += self.block_size
            if self.healthy >= self.next_calibration:
                self._calibrate()
        self.block_2, self.block_1 = self.block_1, mean
        self.blocks += 1
        self.block_sum, self.block_size = 0.0, 0

    def finish(self) -> list[ChannelEvent]:
        """The log is complete: say of an open event what its last points say."""
        if self.non_finite and not non_finite_event(self).unresolved:
            return confirm_non_finite(self)
        excursion = self.excursion
        return [excursion.event] if excursion is not None and excursion.finish() else []
