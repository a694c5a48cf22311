"""What each resume did: the loss aligned at it, how fast it came back, and which other channels jumped."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from chronicle.story.assemble import LaunchStory, Story
from chronicle.story.series import ChannelCurve, LaunchSeries, descent
from rollback.channels import Role, find_channel

NORMAL_MAD = 1.4826  # MAD -> standard deviation of a normal distribution
WINDOW_STEPS = 200  # before and after a resume
MOST_WINDOWS = 100
FIRST_POINTS = 20  # after a resume
LEAST_POINTS = 8  # before a resume


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """The jump of one channel at a resume, in standard deviations of the points before it."""

    channel: str
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
    shifts: tuple[Shift, ...]  # of the other channels, largest first


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
        name = find_channel(own, Role.LOSS)
        if name is None:
            continue
        before = {channel: _history(story, by_launch, launch.number, channel) for channel in own}
        shifts = _shifts(launch.span.start_step, own, before, name)
        window = _window(launch.number, launch.span.start_step, own[name], before[name], shifts)
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


def _shifts(
    start: int, own: Mapping[str, ChannelCurve], before: Mapping[str, Sequence[tuple[int, float]]], loss: str
) -> tuple[Shift, ...]:
    found = []
    for name, curve in own.items():
        after = [value for _, value in _finite(curve.between(start + 1, start + WINDOW_STEPS))][:FIRST_POINTS]
        old = [value for _, value in before[name]]
        if name != loss and len(after) >= 2 and len(old) >= LEAST_POINTS:
            found.append(Shift(channel=name, sigmas=(fmean(after) - fmean(old)) / _noise(old)))
    return tuple(sorted(found, key=lambda shift: -abs(shift.sigmas)))


def _window(
    number: int, start: int, loss: ChannelCurve, before: Sequence[tuple[int, float]], shifts: tuple[Shift, ...]
) -> ResumeWindow | None:
    after = _finite(loss.between(start + 1, start + WINDOW_STEPS))
    if len(before) < LEAST_POINTS or len(after) < 2:
        return None
    level = median(value for _, value in before)
    bump, half_life = _recovery(start, after, level, _noise([value for _, value in before]))
    points = [*before, *after]
    return ResumeWindow(
        launch=number,
        step=start,
        offsets=tuple(step - start for step, _ in points),
        excess=tuple(value - level for _, value in points),
        bump=bump,
        half_life_steps=half_life,
        shifts=shifts,
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


def would_have_resumed_at(story: Story, launch: LaunchStory) -> int | None:
    """The step at which a launch without steps would have resumed: from its guard or start, else from the last rollback."""
    verdict = launch.verdict_entry
    known = launch.span.start_step if verdict is None or verdict.step is None else verdict.step
    if known is not None or verdict is None:
        return known
    return next((mark.to_step for mark in reversed(story.lineage.rollbacks) if mark.entry_id < verdict.id), None)
