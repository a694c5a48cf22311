"""What stands beside an event: which data sources moved, a restart just before it, a wrong learning rate.

Evidence, not verdicts: short sentences in the event. One verdict is drawn here: where the total moved and no source
did, the mixture moved (Simpson's paradox as a training incident).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollback.detect.channel import Channel

VIEW_POINTS = 16
MOVED_SIGMAS = 3.0
STILL_SIGMAS = 1.0
MIX_POINTS = 24  # points after the onset before a mixture is blamed
WEIGHT_CHANGE = 0.02


@dataclass(frozen=True, slots=True)
class SourceView:
    """How far each source's loss stands from its own reference, in noise units of a mean."""

    moved: tuple[str, ...]
    still: tuple[str, ...]


def view_sources(sources: Mapping[str, Channel], since_row: int) -> SourceView:
    """Compare the points since `since_row` of every source with the points before it."""
    moved, still = [], []
    for name, channel in sources.items():
        shift = _shift(channel, since_row)
        if shift is None:
            continue
        if shift >= MOVED_SIGMAS:
            moved.append(name)
        elif abs(shift) <= STILL_SIGMAS:
            still.append(name)
    return SourceView(tuple(moved), tuple(still))


def _shift(channel: Channel, since_row: int) -> float | None:
    """Mean after minus mean before, in units of one point's noise; None without points on both sides.

    After: the first or the last points since then, whichever stand higher; a spike is over when its event closes.
    """
    since = [item[3] for item in channel.buffer if item[0] >= since_row]
    after = max(since[:VIEW_POINTS], since[-VIEW_POINTS:], key=lambda part: math.fsum(part) / max(1, len(part)))
    before = [item[3] for item in channel.buffer if item[0] < since_row][-4 * VIEW_POINTS :]
    if not after or len(before) < VIEW_POINTS or channel.scale <= 0.0:
        return None
    return (math.fsum(after) / len(after) - math.fsum(before) / len(before)) / channel.scale


def source_sentence(view: SourceView) -> str | None:
    """`only loss/cm4 moved, not loss/pmd`; None when there is nothing to tell apart."""
    if not view.moved:
        return None
    if view.still:
        return f"moved: {', '.join(view.moved)}; not {', '.join(view.still)}"
    return f"all sources moved: {', '.join(view.moved)}" if len(view.moved) > 1 else None


def is_mix_shift(view: SourceView, count: int) -> bool:
    """The total moved, every source stayed: at least two of them, all seen."""
    return count >= 2 and not view.moved and len(view.still) == count


def changed_weights(recent: Mapping[str, Sequence[float]]) -> tuple[str, ...]:
    """Names of mixture shares whose last points differ from those before by more than two per cent of the whole."""
    names = []
    for name, values in recent.items():
        half = len(values) // 2
        if half >= 4 and abs(math.fsum(values[half:]) / (len(values) - half) - math.fsum(values[:half]) / half) > WEIGHT_CHANGE:
            names.append(name)
    return tuple(names)
