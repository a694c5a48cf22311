"""One logged series folded point by point: a local baseline for sudden events, a slow one with a CUSUM for gradual ones.

The *local* layer compares a value with a fast level and the quartiles of the last 64 residuals: a robust z whose
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
from typing import Any

from rollback.detect.calibrate import calibrate_inflation
from rollback.detect.config import ChannelConfig
from rollback.detect.events import Status
from rollback.detect.excursion import ChannelEvent, Excursion
from rollback.detect.onset import find_onset
from rollback.detect.quantum import GridSense

IQR_TO_SIGMA = 0.7413
SCALARS = (
    "rows", "last_step", "level", "middle", "slow", "scale", "inflation", "cusum", "cusum_row", "tail_u", "tail_beta",
    "pairs", "hot", "cold", "far", "marginal", "frozen", "wander", "next_calibration", "healthy", "block_sum",
    "block_size", "block_1", "block_2", "blocks", "long_run", "last_end", "restart_row", "non_finite", "next_id",
    "last_hot", "quantum", "settled", "height", "relapse", "relapse_row", "plateau",
)  # fmt: skip
PARTS = (
    "before", "buffer", "config", "events", "excursion", "gains", "grid", "lagged", "name", "order", "residuals",
    "respikes", "sorted", "warm",
)  # fmt: skip


class Channel:
    """The fold of one series; `feed` returns the channel events that a point opened or changed, mostly none."""

    __slots__ = (*SCALARS, *PARTS)

    def __init__(self, name: str, config: ChannelConfig) -> None:
        self.name, self.config = name, config
        self.gains = (2.0 / (config.slow_points + 1), 2.0 / (config.middle_points + 1))
        self.rows = 0
        self.last_step: int | None = None
        self.warm: list[tuple[int, int, float]] = []
        self.level = self.middle = self.slow = self.scale = 0.0
        self.inflation = 1.0
        self.wander = 1.0  # the least inflation that the run's own residuals ask for
        self.healthy = 0  # points folded outside events
        self.next_calibration = config.calibrate_points
        self.cusum, self.cusum_row = 0.0, -1
        self.tail_u, self.tail_beta = 1.645, config.tail_prior
        self.pairs = 0  # bits: which of the last three points were near the threshold
        self.hot = 0  # points above the threshold in a row
        self.far = 0  # points far above the reference in a row
        self.marginal = 1.5  # mean absolute residual x 1.25, in units of the local scale
        self.cold = 0  # points far below it in a row
        self.last_hot = -1000
        self.frozen = 0
        self.block_sum, self.block_size, self.block_1, self.block_2, self.blocks = 0.0, 0, 0.0, 0.0, 0
        self.long_run = 0.0
        self.last_end = self.restart_row = -(10**9)
        self.non_finite = 0  # points in a row
        self.next_id = 0
        self.quantum = 0.0
        self.settled = 0
        self.height = config.cusum_height
        self.relapse, self.relapse_row, self.plateau = 0.0, -1, 0.0
        self.order: deque[float] = deque()
        self.sorted: list[float] = []
        self.lagged: deque[float] = deque(maxlen=max(1, config.lag_points // 16))
        self.buffer: deque[tuple[int, int, float, float]] = deque(maxlen=config.buffer_points)
        self.residuals: deque[float] = deque(maxlen=config.residual_points)
        self.grid = GridSense()
        self.excursion: Excursion | None = None
        self.respikes: list[ChannelEvent] = []
        self.before: tuple[float, float] | None = None  # level and natural fall before the last restart
        self.events: list[ChannelEvent] = []  # open ones only

    def feed(self, row: int, step: int, raw: float) -> list[ChannelEvent] | None:
        """Fold one value; rows and steps are the log's own. Returns the events changed by it, or None."""
        if raw - raw != 0.0:
            return self._feed_non_finite(row, step)
        config = self.config
        value = raw
        if config.log:
            value = math.log10(raw) if raw > 1e-12 else -12.0
        changed = self._close_non_finite(row, step) if self.non_finite else None
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
                    changed = self._feed_drop(row, step, value, level, changed)
                self.level = level = value - centre  # an improvement that stays is followed at once
        else:
            self.cold = 0
        if sudden:
            self.hot += 1
            if self.hot >= 16:
                self._resettle()
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
        unit = scale * math.sqrt(math.sqrt(self.inflation))
        reference = self.slow
        lagged = self.lagged
        if count >= 192 and lagged and lagged[0] < reference:
            reference = lagged[0]
        deviation = (value - reference) / unit
        self.buffer.append((row, step, deviation, value))
        excursion = self.excursion
        if excursion is not None:
            return self._feed_open(row, step, value, sudden, z, sigma, changed)
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
        height = self.height * math.sqrt(self.inflation)
        if count < 600:
            height *= 1.5 if count >= 192 else 2.0 if count >= 64 else 3.0
        if sudden or cusum >= height:
            return self._open(row, step, value, sudden, z, sigma, reference, unit, changed)
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
            if self.block_size >= config.block_points:
                self._end_block()
            if row - self.restart_row <= config.too_good_points + 16:
                changed = self._feed_restarted(row, step, changed)
        return changed

    def _feed_drop(
        self, row: int, step: int, value: float, level: float, changed: list[ChannelEvent] | None
    ) -> list[ChannelEvent] | None:
        """A sudden fall that stayed for four points, far outside the run's own range: other data, or other weights."""
        fall = level - value
        if self.rows < self.config.drop_history or fall < self.config.drop_marginals * self.marginal * self.scale:
            return changed
        return [*(changed or ()), self._closed_event("drop", row, step, value, level)]

    def _feed_restarted(
        self, row: int, step: int, changed: list[ChannelEvent] | None
    ) -> list[ChannelEvent] | None:
        """Soon after a restart: is the loss lower than its own descent explains? Then it sees data again."""
        if self.before is None or len(self.buffer) < 48 or row - self.restart_row < 48:
            return changed
        base, natural = self.before
        recent = [item[3] for item in list(self.buffer)[-48:]]
        mean = math.fsum(recent) / len(recent)
        unit = self.scale * math.sqrt(self.inflation)
        gain = base - mean - 2.0 * natural * (row - self.restart_row) / 256.0
        if gain < self.config.too_good_sigmas * max(unit, 0.5 * self.marginal * self.scale):
            return changed
        self.before = None
        return [*(changed or ()), self._closed_event("too-good", row, step, mean, base)]

    def _closed_event(self, shape: str, row: int, step: int, value: float, level: float) -> ChannelEvent:
        return ChannelEvent(
            id=self._take_id(), channel=self.name, shape=shape, alarm_row=row, alarm_step=step, onset_row=row,
            onset_step=step, onset_low_row=row, onset_low_step=step, level=level, sigma=self.scale, closed=True,
            excess=value - level, sigmas=(value - level) / self.scale, peak_row=row, peak_step=step, respike=True,
            after_restart=row - self.restart_row <= self.config.restart_points,
        )  # fmt: skip

    def _calibrate(self) -> None:
        """On a geometric schedule: how much wander the run's own healthy residuals hold."""
        config = self.config
        self.next_calibration = min(2 * self.healthy, self.healthy + config.recalibrate_points)
        self.wander = calibrate_inflation(
            self.residuals, self.wander, height=config.cusum_height, slack=config.cusum_slack, limit=config.max_inflation
        )
        self.inflation = max(self.inflation, self.wander)

    def begin_segment(self, row: int, *, new_interval: bool) -> None:
        """A launch begins with the next point, or the log interval changed; the latter starts new baselines."""
        if not new_interval:
            self.restart_row = row
            self.before = self._descent()
        elif self.excursion is None:
            self.sorted, self.warm, self.cusum, self.pairs, self.hot = [], [], 0.0, 0, 0
            self.lagged.clear()
            self.buffer.clear()

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
        self.scale = max(sigma, floor, 1e-300)
        tail = values[len(values) // 2 :]
        self.middle = self.slow = sum(tail) / len(tail)
        self.inflation, self.blocks, self.block_sum, self.block_size = 1.5, 0, 0.0, 0
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
            self.inflation = min(self.config.max_inflation, max(self.wander, ratio))
            self.healthy += self.block_size
            if self.healthy >= self.next_calibration:
                self._calibrate()
        self.block_2, self.block_1 = self.block_1, mean
        self.blocks += 1
        self.block_sum, self.block_size = 0.0, 0

    def _open(
        self, row: int, step: int, value: float, sudden: bool, z: float, sigma: float, reference: float, unit: float,
        changed: list[ChannelEvent] | None,
    ) -> list[ChannelEvent]:  # fmt: skip
        tail = self._suspects(row)
        residuals = [item[2] for item in tail]
        onset = find_onset(residuals, inflation=math.sqrt(self.inflation))
        first, low = tail[onset.index], tail[onset.low_index]
        local = sudden and value - reference < 3.0 * unit
        if local:  # sudden against the fast level only: the slow reference lies higher (early descent)
            before = sorted(item[3] for item in list(self.buffer)[-33:-1])
            reference, unit = before[len(before) // 2] if before else value - z * sigma, sigma
            first = low = tail[-1]
        event = ChannelEvent(
            id=self._take_id(), channel=self.name, shape="gradual", alarm_row=row, alarm_step=step,
            onset_row=first[0], onset_step=first[1], onset_low_row=low[0], onset_low_step=low[1], level=reference,
            sigma=unit, inflation=1.0 if local else self.inflation, decades=self.config.log,
            after_restart=row - self.restart_row <= self.config.restart_points,
        )  # fmt: skip
        if sudden and row - first[0] <= 10:
            event.shape = "instant"
        self.events.append(event)
        self.excursion = Excursion(self.config, event, reference, unit)
        self.excursion.feed(row, step, value)
        self.last_hot = row
        return [*(changed or ()), event]

    def _suspects(self, row: int) -> list[tuple[int, int, float, float]]:
        """The points among which the onset is sought: from a little before the CUSUM last left zero."""
        start = (self.cusum_row if self.cusum > 0.0 else row) - 96
        start = max(start, self.last_end)
        tail = [item for item in self.buffer if item[0] >= start]
        return tail or [self.buffer[-1]]

    def _feed_open(
        self, row: int, step: int, value: float, sudden: bool, z: float, sigma: float,
        changed: list[ChannelEvent] | None,
    ) -> list[ChannelEvent] | None:  # fmt: skip
        excursion = self.excursion
        assert excursion is not None
        result = list(changed or ())
        if sudden and row - self.last_hot > 6 and self.settled >= 24 and not self.respikes:
            result.append(self._respike(row, step, value, z, sigma))
        if sudden:
            self.last_hot = row
            if self.hot == 4 and row - excursion.event.alarm_row <= 8:
                excursion.event.persistent = True
                result.append(excursion.event)
        if self.respikes:
            result.extend(self._follow_respikes(row, step, value, z))
        relapse = self._feed_relapse(row, step, value, excursion)
        if relapse is not None:
            result.append(relapse)
        if excursion.feed(row, step, value):
            result.append(excursion.event)
        if excursion.event.closed:
            self._close(row, recovered=excursion.event.status is Status.RECOVERED)
        return result or None

    def _respike(self, row: int, step: int, value: float, z: float, sigma: float) -> ChannelEvent:
        """A sudden event on top of an open one: its own short life, judged against the local level."""
        event = ChannelEvent(
            id=self._take_id(), channel=self.name, shape="instant", alarm_row=row, alarm_step=step, onset_row=row,
            onset_step=step, onset_low_row=row, onset_low_step=step, level=value - z * sigma, sigma=sigma, sigmas=z,
            excess=z * sigma, peak_row=row, peak_step=step, respike=True,
        )  # fmt: skip
        self.events.append(event)
        self.respikes.append(event)
        return event

    def _feed_relapse(self, row: int, step: int, value: float, excursion: Excursion) -> ChannelEvent | None:
        """A second rise on top of an open event: the same CUSUM against the level at which the event had settled."""
        if excursion.count < 2 * self.config.preview_points:
            self.plateau = value if excursion.count == 0 else self.plateau + (value - self.plateau) * 0.06
            return None
        deviation = (value - self.plateau) / excursion.unit
        before = self.relapse
        self.relapse = max(0.0, before + max(-4.0, min(4.0, deviation)) - self.config.cusum_slack)
        if self.relapse > 0.0 and before == 0.0:
            self.relapse_row = row
        height = self.height * math.sqrt(self.inflation)
        if self.relapse < 0.34 * height:
            self.plateau += (value - self.plateau) * 0.02
        if self.relapse < height:
            return None
        tail = [item for item in self.buffer if item[0] >= self.relapse_row - 16]
        onset = find_onset([(item[3] - self.plateau) / excursion.unit for item in tail], inflation=math.sqrt(self.inflation))
        first, low = tail[onset.index], tail[onset.low_index]
        event = ChannelEvent(
            id=self._take_id(), channel=self.name, shape="gradual", alarm_row=row, alarm_step=step,
            onset_row=first[0], onset_step=first[1], onset_low_row=low[0], onset_low_step=low[1], level=self.plateau,
            sigma=excursion.unit, sigmas=deviation, excess=value - self.plateau, peak_row=row, peak_step=step,
            respike=True,
        )  # fmt: skip
        self.relapse, self.plateau = 0.0, max(value, self.plateau)
        if any(known.shape == "gradual" for known in self.respikes):
            return None
        self.events.append(event)
        self.respikes.append(event)
        return event

    def _follow_respikes(self, row: int, step: int, value: float, z: float) -> list[ChannelEvent]:
        done = []
        for event in self.respikes:
            if value - event.level > (event.excess or 0.0):
                event.excess, event.peak_row, event.peak_step = value - event.level, row, step
                event.sigmas = event.excess / event.sigma
            calm = sum((item[3] - event.level) < 3.0 * event.sigma for item in list(self.buffer)[-8:])
            if row - event.alarm_row >= 8 and calm >= 7:
                event.status, event.recovered_row, event.recovered_step = Status.RECOVERED, row, step
            elif row - event.alarm_row >= (64 if event.shape == "instant" else 200):
                event.status = Status.PARTIAL
            else:
                continue
            event.closed = True
            done.append(event)
        for event in done:
            self.respikes.remove(event)
            self.events.remove(event)
        return done

    def _close(self, row: int, *, recovered: bool) -> None:
        excursion = self.excursion
        assert excursion is not None
        if excursion.event in self.events:
            self.events.remove(excursion.event)
        self.excursion = None
        self.cusum, self.frozen, self.last_end = 0.0, 0, row
        self.block_sum, self.block_size, self.blocks = 0.0, 0, 0
        recent = sorted(item[3] for item in list(self.buffer)[-96:])
        present = recent[len(recent) // 2]
        if recovered:
            present = min(present, self.slow)
            self._learn_from(excursion.event)
        self.middle = self.slow = present
        self.lagged.clear()
        self.relapse = 0.0

    def _learn_from(self, event: ChannelEvent) -> None:
        """A slow rise that went away by itself was the run's own wander (of 20 real divergences one did that)."""
        if event.shape == "gradual" and not event.after_restart:
            self.wander = min(self.config.max_inflation, 1.6 * max(self.wander, event.inflation))
            self.inflation = max(self.inflation, self.wander)

    def _feed_non_finite(self, row: int, step: int) -> list[ChannelEvent] | None:
        self.non_finite += 1
        if self.non_finite > 1:
            return self._confirm_non_finite() if self.non_finite == self.config.non_finite_points else None
        event = ChannelEvent(
            id=self._take_id(), channel=self.name, shape="nan", alarm_row=row, alarm_step=step, onset_row=row,
            onset_step=step, onset_low_row=row, onset_low_step=step, level=self.level, sigma=self.scale, peak_row=row,
            peak_step=step,
        )  # fmt: skip
        self.events.append(event)
        return [event]

    def _close_non_finite(self, row: int, step: int) -> list[ChannelEvent]:
        self.non_finite = 0
        event = self._non_finite_event()
        event.status, event.closed = Status.RECOVERED, True
        event.recovered_row, event.recovered_step = row, step
        self.events.remove(event)
        return [event]

    def _non_finite_event(self) -> ChannelEvent:
        return next(event for event in self.events if event.shape == "nan")

    def _confirm_non_finite(self) -> list[ChannelEvent]:
        """One NaN can be a skipped step; several are weights that no longer work."""
        event = self._non_finite_event()
        event.unresolved, event.status = True, Status.DIVERGING
        return [event]

    def finish(self) -> list[ChannelEvent]:
        """The log is complete: say of an open event what its last points say."""
        if self.non_finite and not self._non_finite_event().unresolved:
            return self._confirm_non_finite()
        excursion = self.excursion
        return [excursion.event] if excursion is not None and excursion.finish() else []

    def _take_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def to_json(self) -> dict[str, Any]:
        """Everything the fold needs to go on as if it had never stopped."""
        record: dict[str, Any] = {name: getattr(self, name) for name in SCALARS}
        record["name"] = self.name
        record["before"] = None if self.before is None else list(self.before)
        record["warm"] = [list(item) for item in self.warm]
        record["residuals"] = list(self.residuals)
        record["order"], record["lagged"] = list(self.order), list(self.lagged)
        record["buffer"] = [list(item) for item in self.buffer]
        record["grid"] = self.grid.to_json()
        record["events"] = [event.to_json() for event in self.events]
        record["respikes"] = [event.id for event in self.respikes]
        record["excursion"] = self.excursion and self.excursion.to_json()
        return record

    @classmethod
    def from_json(cls, config: ChannelConfig, record: dict[str, Any]) -> Channel:
        channel = cls(record["name"], config)
        for name in SCALARS:
            setattr(channel, name, record[name])
        channel.before = None if record["before"] is None else (record["before"][0], record["before"][1])
        channel.warm = [(row, step, value) for row, step, value in record["warm"]]
        channel.order = deque(record["order"])
        channel.sorted = sorted(channel.order)
        channel.lagged.extend(record["lagged"])
        channel.buffer.extend((row, step, z, value) for row, step, z, value in record["buffer"])
        channel.residuals.extend(record["residuals"])
        channel.grid = GridSense(*record["grid"])
        channel.events = [ChannelEvent.from_json(event) for event in record["events"]]
        by_id = {event.id: event for event in channel.events}
        channel.respikes = [by_id[number] for number in record["respikes"]]
        if record["excursion"] is not None:
            event = by_id[record["excursion"]["event"]]
            channel.excursion = Excursion.from_json(config, event, record["excursion"])
        return channel
