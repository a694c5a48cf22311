"""What the curves show about learning: whether the loss still improves, and what each resume did to it.

`tell_progress` masks spikes and reports a rolling median, its slope and plateaus. `resume_windows` aligns the curves at each
resume and measures how fast the loss came back and which other channels jumped.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from chronicle.story.assemble import LaunchStory, Story
from chronicle.story.series import ChannelCurve, LaunchSeries, descent
from rollback.channels import Role, find_channel

BINS = 240
SPIKE_SIGMAS = 5.0
NORMAL_MAD = 1.4826  # MAD -> standard deviation of a normal distribution
COARSE_VALUES = 24  # distinct values among the last COARSE_POINTS: bf16 near 1.7 has a step of 1/128
COARSE_POINTS = 1000
PLATEAU_FRACTION = 0.25  # of the run's steps
LEAST_BINS = 12
WINDOW_STEPS = 200  # before and after a resume
MOST_WINDOWS = 100
FIRST_POINTS = 20  # after a resume
LEAST_POINTS = 8  # before a resume


# --- does the loss still improve? ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How the loss develops. `steps` and `medians`: the rolling median without spikes. Slopes: last quarter, per 1000 steps."""

    steps: tuple[int, ...] = ()
    medians: tuple[float, ...] = ()
    masked_points: int = 0
    slope_per_1000: float | None = None
    slope_error: float | None = None
    plateau: bool = False
    distinct_values: int | None = None  # only if there are suspiciously few


def canonical(story: Story, series: Sequence[LaunchSeries], channel: str) -> ChannelCurve:
    """The curve of the lineage: every step once, from the launch that the weights descend from."""
    by_launch = {s.launch: s.channels for s in series}
    whole = ChannelCurve()
    for interval in story.lineage.kept:
        curve = by_launch.get(interval.launch, {}).get(channel, ChannelCurve())
        whole.extend(curve.between(interval.first, interval.last))
    return whole


def tell_progress(story: Story, series: Sequence[LaunchSeries]) -> Progress:
    """The development of the training loss. Slope and plateau need at least `LEAST_BINS` bins."""
    name = find_channel((name for s in series for name in s.channels), Role.LOSS)
    if name is None:
        return Progress()
    rows = _finite(canonical(story, series, name))
    width = max(1, math.ceil(len(rows) / BINS))
    bins = [rows[i : i + width] for i in range(0, len(rows), width)]
    masked = [_masked(part) for part in bins]
    centres = tuple(part[len(part) // 2][0] for part in bins)
    medians = tuple(median(kept) for kept, _ in masked)
    tail = max(LEAST_BINS, int(len(bins) * PLATEAU_FRACTION))
    slope, error = _slope(centres[-tail:], medians[-tail:])
    last = [v for _, v in rows[-COARSE_POINTS:]]
    distinct = len(set(last))
    return Progress(
        steps=centres,
        medians=medians,
        masked_points=sum(count for _, count in masked),
        slope_per_1000=None if slope is None else 1000 * slope,
        slope_error=None if error is None else 1000 * error,
        plateau=slope is not None and error is not None and len(bins) >= 2 * LEAST_BINS and slope > -2 * error,
        distinct_values=distinct if len(last) >= 200 and distinct <= COARSE_VALUES else None,
    )


def _masked(part: Sequence[tuple[int, float]]) -> tuple[list[float], int]:
    values = [v for _, v in part]
    middle = median(values)
    scale = NORMAL_MAD * median(abs(v - middle) for v in values)
    kept = [v for v in values if scale == 0 or v - middle <= SPIKE_SIGMAS * scale]
    return kept, len(values) - len(kept)


def _slope(steps: Sequence[int], values: Sequence[float]) -> tuple[float | None, float | None]:
    """Slope by least squares and its standard error; None for fewer than `LEAST_BINS` points."""
    count = len(steps)
    if count < LEAST_BINS:
        return None, None
    mean_x, mean_y = sum(steps) / count, sum(values) / count
    spread = sum((x - mean_x) ** 2 for x in steps)
    if spread == 0:
        return None, None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(steps, values, strict=True)) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(steps, values, strict=True))
    return slope, math.sqrt(rest / (count - 2) / spread)


# --- what a resume did --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """The jump of one channel at a resume, in standard deviations of the points before it."""

    channel: str
    before: float
    after: float
    sigmas: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeWindow:
    """One resume: offsets in steps from it, and the loss relative to the median before it."""

    launch: int
    step: int
    offsets: tuple[int, ...]
    excess: tuple[float, ...]
    bump: float | None  # largest smoothed excess among the first points
    half_life_steps: int | None  # until half of the bump is gone; None: not within the window, or no bump
    shifts: tuple[Shift, ...] = ()  # largest first


def resume_windows(story: Story, series: Sequence[LaunchSeries]) -> tuple[ResumeWindow, ...]:
    """The newest `MOST_WINDOWS` launches that resumed and have points on both sides."""
    by_launch = {s.launch: s.channels for s in series}
    out: list[ResumeWindow] = []
    for launch in reversed(story.launches):
        if len(out) == MOST_WINDOWS:
            break
        if not launch.resumed or launch.span.start_step is None:
            continue
        own = by_launch.get(launch.number, {})
        before = {name: _history(story, by_launch, launch.number, name) for name in own}
        window = _window(launch.number, launch.span.start_step, own, before)
        if window is not None:
            out.append(window)
    return tuple(reversed(out))


def _history(
    story: Story, by_launch: Mapping[int, Mapping[str, ChannelCurve]], number: int, channel: str
) -> list[tuple[int, float]]:
    """The last `WINDOW_STEPS` steps before this launch, along its ancestors, in step order."""
    launch = story.launch(number)
    limit = None if launch is None else launch.span.start_step
    out: list[tuple[int, float]] = []
    if launch is None or limit is None:
        return out
    oldest = limit - WINDOW_STEPS
    for parent, first, last in descent(story, launch.span.parent, limit):
        if last <= oldest:
            break
        curve = by_launch.get(parent, {}).get(channel, ChannelCurve())
        out = [*_finite(curve.between(max(first, oldest + 1), last)), *out]
    return out


def _window(
    number: int, start: int, own: Mapping[str, ChannelCurve], before: Mapping[str, list[tuple[int, float]]]
) -> ResumeWindow | None:
    name = find_channel(own, Role.LOSS)
    if name is None or len(before[name]) < LEAST_POINTS:
        return None
    after = _finite(own[name].between(start + 1, start + WINDOW_STEPS))
    if len(after) < 2:
        return None
    level = median(value for _, value in before[name])
    bump, half_life = _recovery(start, after, level, _noise([v for _, v in before[name]]))
    points = [*before[name], *after]
    return ResumeWindow(
        launch=number,
        step=start,
        offsets=tuple(step - start for step, _ in points),
        excess=tuple(value - level for _, value in points),
        bump=bump,
        half_life_steps=half_life,
        shifts=_shifts(start, own, before, name),
    )


def _finite(curve: ChannelCurve) -> list[tuple[int, float]]:
    return [(s, v) for s, v in zip(curve.steps, curve.values, strict=True) if math.isfinite(v)]


def _noise(values: Sequence[float]) -> float:
    """A robust standard deviation, greater than zero."""
    middle = median(values)
    return NORMAL_MAD * median(abs(v - middle) for v in values) or abs(middle) * 1e-3 or 1e-9


def _recovery(start: int, after: Sequence[tuple[int, float]], level: float, noise: float) -> tuple[float | None, int | None]:
    smooth = [median(v for _, v in after[max(0, i - 2) : i + 3]) - level for i in range(len(after))]
    peak = max(range(min(FIRST_POINTS, len(smooth))), key=smooth.__getitem__)
    if smooth[peak] < 2 * noise:
        return None, None
    for i in range(peak, len(smooth)):
        if smooth[i] <= smooth[peak] / 2:
            return smooth[peak], after[i][0] - start
    return smooth[peak], None


def _shifts(
    start: int, own: Mapping[str, ChannelCurve], before: Mapping[str, list[tuple[int, float]]], loss: str
) -> tuple[Shift, ...]:
    found = []
    for name, curve in own.items():
        after = [v for _, v in _finite(curve.between(start + 1, start + WINDOW_STEPS))][:FIRST_POINTS]
        old = [v for _, v in before[name]]
        if name == loss or len(after) < 2 or len(old) < LEAST_POINTS:
            continue
        sigmas = (fmean(after) - fmean(old)) / _noise(old)
        found.append(Shift(channel=name, before=fmean(old), after=fmean(after), sigmas=sigmas))
    return tuple(sorted(found, key=lambda shift: -abs(shift.sigmas)))


def would_have_resumed_at(story: Story, launch: LaunchStory) -> int | None:
    """The step at which a launch without steps would have resumed: from its guard or start, else from the last rollback."""
    verdict = launch.verdict_entry
    known = launch.span.start_step if verdict is None or verdict.step is None else verdict.step
    if known is not None or verdict is None:
        return known
    return next((mark.to_step for mark in reversed(story.lineage.rollbacks) if mark.entry_id < verdict.id), None)
