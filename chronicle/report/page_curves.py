"""The curves of the HTML page, thinned so that a page stays small however many steps, launches and channels there are. Pure.

Up to `MANY` launches each gets its share of the points by its length. Of more, most would hold a handful of points each: the
kept parts together are thinned as one curve, and so are the abandoned ones, so that the highest and the lowest stay.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from chronicle.report.page_cards import packed
from chronicle.story.assemble import Story
from chronicle.story.series import Curve, LaunchSeries, smooth, thin

__all__ = ["MANY", "channel_curves", "cut"]

POINTS = 8_000  # of one channel over all launches: finer than any screen, quick as SVG; 40 channels are below 5 MB
MANY, MANY_POINTS = 200, 2_000  # of that many launches most points stand alone, and a dot costs as much as a line
LEAST_BUCKETS = 6
SMOOTHED_POINTS, SMOOTH_BINS = 120, 160
FOREVER = 1 << 62


def channel_curves(story: Story, series: Sequence[LaunchSeries], name: str) -> list[dict[str, Any]]:
    """One row a launch that has anything to draw: `kept`, `gone` (abandoned) and `drift` (smoothed), each only where it is."""
    parts = cut(story, series, name)
    total = max(1, sum(len(kept.steps) + len(gone.steps) for kept, gone in parts.values()))
    kept = _thinned({launch: both[0] for launch, both in parts.items()}, total)
    gone = _thinned({launch: both[1] for launch, both in parts.items()}, total)
    rows = []
    for launch, (whole, _) in parts.items():
        drift = smooth(whole, SMOOTH_BINS * len(whole.steps) // total, SMOOTHED_POINTS)
        found = {"kept": kept.get(launch), "gone": gone.get(launch), "drift": drift}
        drawn = {part: packed(curve) for part, curve in found.items() if curve is not None and curve.steps}
        if drawn:
            rows.append({"launch": launch, **drawn})
    return rows


def cut(story: Story, series: Sequence[LaunchSeries], name: str) -> dict[int, tuple[Curve, Curve]]:
    """What was kept and what was abandoned of a channel, by launch."""
    parts = {}
    for launch in series:
        curve, told = launch.channels.get(name), story.launch(launch.launch)
        if curve is not None and told is not None:
            limit = FOREVER if told.span.abandoned_after is None else told.span.abandoned_after
            parts[launch.launch] = (curve.between(0, limit), curve.between(limit + 1, FOREVER))
    return parts


def _thinned(curves: Mapping[int, Curve], total: int) -> dict[int, Curve]:
    if len(curves) <= MANY:
        return {n: thin(curve, max(LEAST_BUCKETS, POINTS // 4 * len(curve.steps) // total)) for n, curve in curves.items()}
    rows = [(n, i) for n, curve in curves.items() for i in range(len(curve.steps))]
    values = [value for curve in curves.values() for value in curve.values]
    line = thin(Curve(list(range(len(rows))), [None] * len(rows), values), max(1, MANY_POINTS // 4 * len(rows) // total))
    found: dict[int, Curve] = {}
    for place in line.steps:
        launch, i = rows[place]
        into = found.setdefault(launch, Curve())
        into.steps.append(curves[launch].steps[i])
        into.times.append(None)
        into.values.append(curves[launch].values[i])
    return found
