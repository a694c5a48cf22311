"""The state of one channel and the lifecycle of its events: open, onset, second rise, recovery, NaN.

`ChannelState` holds what a fold remembers, and its JSON form. The functions below change it when a point opens,
continues or closes an event. The fold itself is in `channel.py`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Self

from rollback.detect.config import ChannelConfig
from rollback.detect.events import Status
from rollback.detect.excursion import ChannelEvent, Excursion, find_onset
from rollback.detect.noise import IQR_TO_SIGMA, GridSense, find_wander

SCALARS = (
    "rows", "age", "last_step", "level", "middle", "slow", "scale", "inflation", "root", "widening", "cusum", "cusum_row",
    "tail_u", "tail_beta", "lone", "pairs", "hot", "cold", "marginal", "wander", "next_calibration", "healthy",
    "block_sum", "block_size", "block_1", "block_2", "blocks", "long_run", "last_end", "restart_row",
    "non_finite", "next_id", "last_hot", "quantum", "settled", "height", "relapse", "relapse_row", "plateau",
    "strayed", "strayed_row", "odd", "odd_points", "odd_run", "odd_row", "odd_top", "high", "carried", "carried_level",
    "carried_root",
)  # fmt: skip
PARTS = (
    "before", "buffer", "config", "events", "excursion", "gains", "grid", "history", "lagged", "name", "order", "residuals",
    "respikes", "sorted", "told", "warm",
)  # fmt: skip


RESPIKE_GAP = 6  # points since the last sudden one
RESPIKE_SETTLED = 10  # ordinary points before a second spike counts
PERSISTENT_POINTS, PERSISTENT_WITHIN = 4, 8  # sudden points in a row, soon after the alarm
RESPIKE_MOST, SECOND_RISE_MOST = 64, 200  # points after which an event on top of another is closed unrecovered
CALM_POINTS, CALM_LEAST, CALM_SIGMAS = 8, 7, 3.0  # a respike is over when 7 of 8 points are within 3 sigma
PLATEAU_FIRST, PLATEAU_LATER = 0.06, 0.02  # gains of the level at which an open event has settled
PRESENT_POINTS = 96  # points whose median is the level after an event
RESTARTED_POINTS, DESCENT_POINTS = 48, 256  # points looked at after a restart; points that `before` measured the fall over
CARRIED_POINTS = 3  # at another log interval, that say how large its noise is
APART_TO_SIGMA = 0.954  # the median distance of two draws of a Gaussian
INSTANT_REFERENCE = 33  # points before a sudden alarm whose median is its reference

Item = tuple[int, int, float, float]  # row, step, deviation in noise units, value


class ChannelState:
    """What a fold remembers; `rows` are points seen, levels are in the channel's unit (log10 for norms)."""

    __slots__ = (*SCALARS, *PARTS)

    def __init__(self, name: str, config: ChannelConfig) -> None:
        self.name, self.config = name, config
        self.gains = (2.0 / (config.slow_points + 1), 2.0 / (config.middle_points + 1))
        self.rows = 0
        self.age = 0  # points since the present baselines began
        self.last_step: int | None = None
        self.warm: list[tuple[int, int, float]] = []
        self.level = self.middle = self.slow = self.scale = 0.0
        self.inflation = self.root = self.widening = 1.0  # long-run over one point's variance, its roots
        self.wander = 1.0  # least inflation at which the run's own residuals raise no alarm
        self.healthy = 0  # points folded outside events
        self.next_calibration = config.calibrate_points
        self.cusum, self.cusum_row = 0.0, -1
        self.tail_u, self.tail_beta = config.tail_first, config.tail_prior
        self.lone = 0.0  # z of an outlier that the next point will show to be alone, or the first of several
        self.pairs = 0  # bits: which of the last three points were near the threshold
        self.hot = 0  # points above the threshold in a row
        self.marginal = config.marginal_first  # spread of the residuals against the slow level, in local noise units
        self.cold = 0  # points far below it in a row
        self.last_hot = -1000
        self.block_sum, self.block_size, self.block_1, self.block_2, self.blocks = 0.0, 0, 0.0, 0.0, 0
        self.long_run = 0.0
        self.last_end = self.restart_row = -(10**9)
        self.non_finite = 0  # points in a row
        self.next_id = 0
        self.quantum = 0.0
        self.settled = 0
        self.height = config.cusum_height
        self.relapse, self.relapse_row, self.plateau = 0.0, -1, 0.0
        self.strayed, self.strayed_row = 0.0, 0  # the highest slow rise that recovered by itself, and when
        self.odd, self.odd_points, self.odd_run, self.odd_row, self.odd_top = 0.0, 0.0, 0, -(10**9), 0.0  # see `_is_usual`
        self.high = 0.0  # by how much the last point rose, where that would be a major spike
        self.carried, self.carried_level, self.carried_root = 0.0, 0.0, 1.0  # of another log interval: `carry_over`
        self.told: list[int] = []  # rows that these called high
        self.order: deque[float] = deque()
        self.sorted: list[float] = []
        self.lagged: deque[float] = deque(maxlen=max(1, config.lag_points // config.lag_every))
        self.buffer: deque[Item] = deque(maxlen=config.buffer_points)
        self.residuals: deque[float] = deque(maxlen=config.residual_points)
        self.history: deque[tuple[int, float, float, float]] = deque(maxlen=512)  # (step, level, middle, slow)
        self.grid = GridSense()
        self.excursion: Excursion | None = None
        self.respikes: list[ChannelEvent] = []
        self.before: tuple[float, float] | None = None  # level and natural fall before the last restart
        self.events: list[ChannelEvent] = []  # open ones only

    def set_inflation(self, inflation: float) -> None:
        """Store the inflation with its square root and fourth root, which are read at each point."""
        self.inflation, self.root = inflation, math.sqrt(inflation)
        self.widening = math.sqrt(self.root)

    def take_id(self) -> int:
        """Return a number that no event of this channel has."""
        self.next_id += 1
        return self.next_id

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain JSON values; floats keep every bit through repr."""
        record: dict[str, Any] = {name: getattr(self, name) for name in SCALARS}
        record["name"] = self.name
        record["before"] = None if self.before is None else list(self.before)
        record["warm"] = [list(item) for item in self.warm]
        record["told"] = list(self.told)
        record["history"] = [list(item) for item in self.history]
        record["residuals"] = list(self.residuals)
        record["order"], record["lagged"] = list(self.order), list(self.lagged)
        record["buffer"] = [list(item) for item in self.buffer]
        record["grid"] = self.grid.to_json()
        record["events"] = [event.to_json() for event in self.events]
        record["respikes"] = [event.id for event in self.respikes]
        record["excursion"] = self.excursion and self.excursion.to_json()
        return record

    @classmethod
    def from_json(cls, config: ChannelConfig, record: Mapping[str, Any]) -> Self:
        """Rebuild a channel from `to_json`; `config` is that of its role."""
        channel = cls(record["name"], config)
        for name in SCALARS:
            setattr(channel, name, record[name])
        channel.before = None if record["before"] is None else (record["before"][0], record["before"][1])
        channel.warm = [(row, step, value) for row, step, value in record["warm"]]
        channel.told = list(record["told"])
        channel.order = deque(record["order"])
        channel.sorted = sorted(channel.order)
        channel.lagged.extend(record["lagged"])
        channel.buffer.extend((row, step, z, value) for row, step, z, value in record["buffer"])
        channel.history.extend((step, level, middle, slow) for step, level, middle, slow in record["history"])
        channel.residuals.extend(record["residuals"])
        channel.grid = GridSense(*record["grid"])
        channel.events = [ChannelEvent.from_json(event) for event in record["events"]]
        by_id = {event.id: event for event in channel.events}
        channel.respikes = [by_id[number] for number in record["respikes"]]
        if record["excursion"] is not None:
            event = by_id[record["excursion"]["event"]]
            channel.excursion = Excursion.from_json(config, event, record["excursion"])
        return channel


# --- A changed log interval: the first points are judged by what was known before it


def carry_over(channel: ChannelState, denser: float) -> None:
    """Keep noise and level for the first points at another interval; `denser` is the old interval over the new one.

    The mean of n steps has the noise σ / √n where the steps are independent, a single step σ: the larger one counts, until
    three points at the new interval say how far apart they lie themselves.
    """
    config, ordered = channel.config, channel.sorted
    if config.log or config.falling:
        return
    if ordered:
        size = len(ordered)
        local = (ordered[(3 * size) >> 2] - ordered[size >> 2]) * IQR_TO_SIGMA
        channel.carried_level = channel.level
        channel.carried = max(local, channel.scale, config.floor_fraction * abs(channel.level))
        channel.carried_root = 1.0
    channel.carried_root *= math.sqrt(max(1.0, denser))
    channel.told = []


def feed_provisional(
    channel: ChannelState, row: int, step: int, value: float, changed: list[ChannelEvent] | None
) -> list[ChannelEvent] | None:
    """Tell a major rise, a fifth of the level, among the first points at an interval, and when it is over.

    The level is the last point that was not told.
    """
    config = channel.config
    quiet = [item[2] for item in channel.warm[:-1] if item[0] not in channel.told]
    level = quiet[-1] if quiet else channel.carried_level
    unit = channel.carried * channel.carried_root
    if channel.carried_root > 1.0 and len(quiet) >= CARRIED_POINTS:
        apart = sorted(abs(later - earlier) for earlier, later in pairwise(quiet))[(len(quiet) - 1) // 2] / APART_TO_SIGMA
        unit = min(unit, max(channel.carried, apart * (1.0 + config.few_points / len(quiet))))
    rise, least = value - level, config.high_fraction * abs(level)
    event = provisional_event(channel)
    if rise < max(least, _threshold(channel) * unit):
        if event is None or event.status is not Status.OPEN:
            return changed
        event.status, event.recovered_row, event.recovered_step = Status.RECOVERED, row, step
        return [*(changed or ()), event]
    channel.told.append(row)
    if event is None:
        event = ChannelEvent(
            id=channel.take_id(), channel=channel.name, shape="instant", alarm_row=row, alarm_step=step, onset_row=row,
            onset_step=step, onset_low_row=row, onset_low_step=step, sigma=unit,
            level=sorted(quiet)[len(quiet) // 2] if len(quiet) >= CARRIED_POINTS else level,
            wander=max(_own_wander(channel, row), least / config.wanders) / unit, provisional=True, young=True,
            after_restart=row - channel.restart_row <= config.restart_points,
        )  # fmt: skip
        channel.events.append(event)
    if event.excess is None or value - event.level > event.excess:
        event.excess, event.sigmas = value - event.level, (value - event.level) / event.sigma
        event.peak_row, event.peak_step = row, step
    event.status, event.recovered_row, event.recovered_step = Status.OPEN, None, None
    return [*(changed or ()), event]


def provisional_event(channel: ChannelState) -> ChannelEvent | None:
    """Return the event that was told by what was known before the log interval changed, while its points warm up."""
    return next((event for event in channel.events if event.provisional), None) if channel.carried else None


def end_provisional(channel: ChannelState) -> list[ChannelEvent]:
    """Judge the provisional event by the noise of its own interval, which is known now; an open one is followed on.

    It stays provisional where no point of the new interval was as low as before: what is logged may have changed with it.
    """
    event = provisional_event(channel)
    first = channel.warm[0][0]
    channel.carried = 0.0
    if event is None:
        return []
    event.confirmed = event.onset_row > first and (event.excess or 0.0) >= _threshold(channel) * channel.scale
    if event.status is Status.OPEN:
        channel.excursion = Excursion(channel.config, event, event.level, event.sigma)
        for row, step, value in channel.warm:
            if row >= event.onset_row:
                channel.excursion.feed(row, step, value)
        channel.last_hot = channel.warm[-1][0]
    else:
        event.closed = True
        channel.events.remove(event)
    return [event]


def abandon_provisional(channel: ChannelState) -> list[ChannelEvent]:
    """Close the provisional event: no further point of its interval will come."""
    event = provisional_event(channel)
    if event is None:
        return []
    if event.status is Status.OPEN:
        event.status = Status.PARTIAL
    event.closed = True
    channel.events.remove(event)
    return [event]


def _threshold(channel: ChannelState) -> float:
    """The robust z from which a point is sudden, by the tail of the run's own noise."""
    config = channel.config
    return min(max(channel.tail_u + config.tail_log_odds * channel.tail_beta, config.local_min), config.local_max)


# --- Lifecycle of events


def feed_drop(
    channel: ChannelState, row: int, step: int, value: float, level: float, changed: list[ChannelEvent] | None
) -> list[ChannelEvent] | None:
    """Report a sudden fall that lasted four points, far outside the run's own range: other data, or other weights."""
    fall = level - value
    if channel.rows < channel.config.drop_history or fall < channel.config.drop_marginals * channel.marginal * channel.scale:
        return changed
    return [*(changed or ()), closed_event(channel, "drop", row, step, value, level)]


def feed_restarted(
    channel: ChannelState, row: int, step: int, changed: list[ChannelEvent] | None
) -> list[ChannelEvent] | None:
    """Report a loss that is lower, soon after a restart, than its own descent explains: data is probably repeated."""
    if channel.before is None or len(channel.buffer) < RESTARTED_POINTS or row - channel.restart_row < RESTARTED_POINTS:
        return changed
    base, natural = channel.before
    recent = [item[3] for item in list(channel.buffer)[-RESTARTED_POINTS:]]
    mean = math.fsum(recent) / len(recent)
    unit = channel.scale * channel.root
    gain = base - mean - 2.0 * natural * (row - channel.restart_row) / DESCENT_POINTS
    if gain < channel.config.too_good_sigmas * max(unit, 0.5 * channel.marginal * channel.scale):
        return changed
    channel.before = None
    return [*(changed or ()), closed_event(channel, "too-good", row, step, mean, base)]


def closed_event(channel: ChannelState, shape: str, row: int, step: int, value: float, level: float) -> ChannelEvent:
    """Make an event that is over when it is found: a drop, or a loss that is too good."""
    return ChannelEvent(
        id=channel.take_id(), channel=channel.name, shape=shape, alarm_row=row, alarm_step=step, onset_row=row,
        onset_step=step, onset_low_row=row, onset_low_step=step, level=level, sigma=channel.scale, closed=True,
        excess=value - level, sigmas=(value - level) / channel.scale, peak_row=row, peak_step=step, respike=True,
        after_restart=row - channel.restart_row <= channel.config.restart_points,
    )  # fmt: skip


def open_event(
    channel: ChannelState, row: int, step: int, value: float, sudden: bool, z: float, sigma: float, reference: float,
    unit: float, changed: list[ChannelEvent] | None,
) -> list[ChannelEvent]:  # fmt: skip
    """Open the event of an alarm: find its onset and its reference, and decide whether it is sudden."""
    tail = suspects(channel, row)
    residuals = [item[2] for item in tail]
    onset = find_onset(residuals, inflation=channel.root)
    first, low = tail[onset.index], tail[onset.low_index]
    if row - first[0] > channel.config.sudden_points:
        low = _earlier(channel, low, row - first[0])
    local = sudden and value - reference < 3.0 * unit
    wander, usual = _own_wander(channel, row), reference + 2.0 * unit
    if local:  # sudden against the fast level only: the slow reference is higher, in the early descent
        before = sorted(item[3] for item in list(channel.buffer)[-INSTANT_REFERENCE:-1])
        reference, unit = before[len(before) // 2] if before else value, sigma
        if reference >= value:  # it falls so steeply that the level of half a window ago is above the spike
            reference = value - z * sigma
        first = low = tail[-1]
        if channel.age >= channel.config.doubt_points:  # no higher than the slow level's own noise reaches: its wander
            wander = max(wander, (usual - reference) / channel.config.wanders)
    event = ChannelEvent(
        id=channel.take_id(), channel=channel.name, shape="gradual", alarm_row=row, alarm_step=step,
        onset_row=first[0], onset_step=first[1], onset_low_row=low[0], onset_low_step=low[1], level=reference,
        sigma=unit, wander=wander / unit, decades=channel.config.log,
        inflation=_local_inflation(channel, sigma) if local else channel.inflation, local=local,
        after_restart=row - channel.restart_row <= channel.config.restart_points,
        strays=channel.strayed > 0.0 and row - channel.strayed_row < channel.config.strayed_half_life,
        young=channel.age - (row - first[0]) < channel.config.middle_points,
    )  # fmt: skip
    if sudden and row - first[0] <= channel.config.sudden_points:
        event.shape = "instant"
    channel.events.append(event)
    channel.excursion = Excursion(channel.config, event, reference, unit)
    channel.excursion.feed(row, step, value)
    channel.last_hot, channel.cusum = row, 0.0
    return [*(changed or ()), event]


def _own_wander(channel: ChannelState, row: int) -> float:
    """Return how far this run has drifted by itself, in the channel's unit: between events, and in recovered ones."""
    strayed = channel.strayed * math.exp2((channel.strayed_row - row) / channel.config.strayed_half_life)
    return max(find_wander(channel.residuals) * channel.scale, strayed)


def _local_inflation(channel: ChannelState, sigma: float) -> float:
    """Return the slow layer's inflation in units of the local noise: a level that wanders is no shift."""
    return max(1.0, min(channel.config.max_inflation, (channel.scale * channel.root / sigma) ** 4))


def _earlier(channel: ChannelState, low: Item, points: int) -> Item:
    """Move the lower bound of a slow rise back by as many points as the alarm came late.

    The likelihood knows steps and straight ramps. Exponential growth spends as long again below the noise.
    """
    wanted = max(low[0] - points, channel.last_end, channel.restart_row)
    return next((item for item in channel.buffer if item[0] >= wanted), low)


def suspects(channel: ChannelState, row: int) -> list[Item]:
    """Return the points among which the onset is sought: from a little before the CUSUM last left zero."""
    start = (channel.cusum_row if channel.cusum > 0.0 else row) - channel.config.onset_reach
    start = max(start, channel.last_end)
    tail = [item for item in channel.buffer if item[0] >= start]
    return tail or [channel.buffer[-1]]


def feed_open(
    channel: ChannelState, row: int, step: int, value: float, sudden: bool, z: float, sigma: float,
    changed: list[ChannelEvent] | None,
) -> list[ChannelEvent] | None:  # fmt: skip
    """Fold one point while an event is open: second spikes, a second rise, and the recovery test."""
    excursion = channel.excursion
    assert excursion is not None
    result = list(changed or ())
    apart = row - channel.last_hot > RESPIKE_GAP and channel.settled >= RESPIKE_SETTLED
    if sudden and apart and not channel.respikes:
        result.append(respike(channel, row, step, value, z, sigma))
    if sudden:
        channel.last_hot = row
        young = (event for event in (excursion.event, *channel.respikes) if row - event.alarm_row <= PERSISTENT_WITHIN)
        if channel.hot == PERSISTENT_POINTS and (lasting := next(young, None)) is not None:
            lasting.persistent = True
            result.append(lasting)
    if channel.respikes:
        result.extend(follow_respikes(channel, row, step, value))
    if not excursion.event.unresolved:  # else it is known as a divergence, and a slow second rise is part of it
        relapse = feed_relapse(channel, row, step, value, excursion)
        if relapse is not None:
            result.append(relapse)
    if excursion.feed(row, step, value):
        result.append(excursion.event)
    if excursion.event.closed:
        close_event(channel, row, recovered=excursion.event.status is Status.RECOVERED)
    return result or None


def respike(channel: ChannelState, row: int, step: int, value: float, z: float, sigma: float) -> ChannelEvent:
    """Open a sudden event on top of an open one; it is judged against the local level."""
    event = ChannelEvent(
        id=channel.take_id(), channel=channel.name, shape="instant", alarm_row=row, alarm_step=step, onset_row=row,
        onset_step=step, onset_low_row=row, onset_low_step=step, level=value - z * sigma, sigma=sigma, sigmas=z,
        excess=z * sigma, peak_row=row, peak_step=step, respike=True,
    )  # fmt: skip
    channel.events.append(event)
    channel.respikes.append(event)
    return event


def feed_relapse(channel: ChannelState, row: int, step: int, value: float, excursion: Excursion) -> ChannelEvent | None:
    """Detect a second rise on top of an open event, by a CUSUM against the level at which the event had settled."""
    if excursion.count < 2 * channel.config.preview_points:
        channel.plateau = value if excursion.count == 0 else channel.plateau + (value - channel.plateau) * PLATEAU_FIRST
        return None
    deviation = (value - channel.plateau) / excursion.unit
    before = channel.relapse
    clip = channel.config.cusum_clip
    channel.relapse = max(0.0, before + max(-clip, min(clip, deviation)) - channel.config.cusum_slack)
    if channel.relapse > 0.0 and before == 0.0:
        channel.relapse_row = row
    height = channel.height * channel.root
    if channel.relapse < channel.config.suspicion * height:
        channel.plateau += (value - channel.plateau) * PLATEAU_LATER
    if channel.relapse < height:
        return None
    tail = [item for item in channel.buffer if item[0] >= channel.relapse_row - 16]
    onset = find_onset([(item[3] - channel.plateau) / excursion.unit for item in tail], inflation=channel.root)
    first, low = tail[onset.index], tail[onset.low_index]
    event = ChannelEvent(
        id=channel.take_id(), channel=channel.name, shape="gradual", alarm_row=row, alarm_step=step,
        onset_row=first[0], onset_step=first[1], onset_low_row=low[0], onset_low_step=low[1], level=channel.plateau,
        sigma=excursion.unit, sigmas=deviation, excess=value - channel.plateau, peak_row=row, peak_step=step,
        respike=True,
    )  # fmt: skip
    channel.relapse, channel.plateau = 0.0, max(value, channel.plateau)
    if any(known.shape == "gradual" for known in channel.respikes):
        return None
    channel.events.append(event)
    channel.respikes.append(event)
    return event


def follow_respikes(channel: ChannelState, row: int, step: int, value: float) -> list[ChannelEvent]:
    """Update the events on top of the open one; returns those that this point closed."""
    done = []
    for event in channel.respikes:
        if value - event.level > (event.excess or 0.0):
            event.excess, event.peak_row, event.peak_step = value - event.level, row, step
            event.sigmas = event.excess / event.sigma
        calm = sum((item[3] - event.level) < CALM_SIGMAS * event.sigma for item in list(channel.buffer)[-CALM_POINTS:])
        if row - event.alarm_row >= CALM_POINTS and calm >= CALM_LEAST:
            event.status, event.recovered_row, event.recovered_step = Status.RECOVERED, row, step
        elif row - event.alarm_row >= (RESPIKE_MOST if event.shape == "instant" else SECOND_RISE_MOST):
            diverges = channel.excursion is not None and channel.excursion.event.unresolved
            event.status = Status.DIVERGING if diverges else Status.PARTIAL  # with what it stands on
        else:
            continue
        event.closed = True
        done.append(event)
    for event in done:
        channel.respikes.remove(event)
        channel.events.remove(event)
    return done


def close_event(channel: ChannelState, row: int, *, recovered: bool) -> None:
    """Leave the open event: the slow levels start again from the present one."""
    excursion = channel.excursion
    assert excursion is not None
    if excursion.event in channel.events:
        channel.events.remove(excursion.event)
    channel.excursion = None
    channel.cusum, channel.last_end = 0.0, row
    channel.block_sum, channel.block_size, channel.blocks = 0.0, 0, 0
    recent = sorted(item[3] for item in list(channel.buffer)[-PRESENT_POINTS:])
    present = recent[len(recent) // 2]
    if recovered:
        present = min(present, channel.slow)
        learn_from(channel, excursion.event)
    channel.middle = channel.slow = present
    channel.lagged.clear()
    channel.relapse = 0.0


def end_returned(channel: ChannelState, row: int, changed: list[ChannelEvent] | None) -> list[ChannelEvent]:
    """Close a sudden event whose loss was back before another rise began, which this point tells: that is its own event."""
    excursion, cusum = channel.excursion, channel.cusum
    assert excursion is not None
    excursion.end_before(channel.cusum_row if cusum > 0.0 else row)
    close_event(channel, row, recovered=True)
    channel.cusum, channel.last_end = cusum, (excursion.event.recovered_row or row - 1) + 1
    return [*(changed or ()), excursion.event]


def abandon_events(channel: ChannelState, row: int, step: int) -> list[ChannelEvent]:
    """Close the open events and restore the levels of this step: the log went back to it. Returns what this closed."""
    closed = [event for event in channel.events if event.shape != "nan"]
    for event in closed:
        event.closed = True
        if event.status is Status.OPEN and (event.unresolved or event.lasting):
            event.status = Status.DIVERGING
    excursion = channel.excursion
    if excursion is not None:
        channel.level = channel.middle = channel.slow = excursion.reference
        channel.excursion = None
    while channel.history and channel.history[-1][0] >= step:
        channel.history.pop()
    if channel.history:
        _, channel.level, channel.middle, channel.slow = channel.history[-1]
    channel.lagged.clear()
    channel.events = [event for event in channel.events if event.shape == "nan"]
    channel.respikes, channel.cusum, channel.last_end = [], 0.0, row
    channel.hot = channel.pairs = 0
    channel.relapse = 0.0
    return closed


def learn_from(channel: ChannelState, event: ChannelEvent) -> None:
    """Add a slow rise that recovered by itself to the run's drift (of 20 real divergences one recovered)."""
    if event.shape == "gradual" and not event.after_restart:
        channel.strayed, channel.strayed_row = max(event.crest, _own_wander(channel, channel.last_end)), channel.last_end
        channel.wander = min(channel.config.stray_inflation, 1.6 * max(channel.wander, event.inflation))
        channel.set_inflation(max(channel.inflation, channel.wander))


def feed_non_finite(channel: ChannelState, row: int, step: int) -> list[ChannelEvent] | None:
    """Fold a NaN or an infinity: the first opens an event, the third in a row confirms it."""
    channel.non_finite += 1
    if channel.non_finite > 1:
        return confirm_non_finite(channel) if channel.non_finite == channel.config.non_finite_points else None
    event = ChannelEvent(
        id=channel.take_id(), channel=channel.name, shape="nan", alarm_row=row, alarm_step=step, onset_row=row,
        onset_step=step, onset_low_row=row, onset_low_step=step, level=channel.level, sigma=channel.scale, peak_row=row,
        peak_step=step,
    )  # fmt: skip
    channel.events.append(event)
    return [event]


def close_non_finite(channel: ChannelState, row: int, step: int) -> list[ChannelEvent]:
    """Close the NaN event: this point is a number again."""
    channel.non_finite = 0
    event = non_finite_event(channel)
    event.status, event.closed = Status.RECOVERED, True
    event.recovered_row, event.recovered_step = row, step
    channel.events.remove(event)
    return [event]


def non_finite_event(channel: ChannelState) -> ChannelEvent:
    """Return the open NaN event."""
    return next(event for event in channel.events if event.shape == "nan")


def confirm_non_finite(channel: ChannelState) -> list[ChannelEvent]:
    """Mark the NaN event as lasting: one NaN can be a skipped step, several are weights that no longer work."""
    event = non_finite_event(channel)
    event.unresolved, event.status = True, Status.DIVERGING
    return [event]
