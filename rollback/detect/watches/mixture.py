"""Which data sources moved with the total loss, and whether the mixture did instead of them.

The total is the sources' mean weighted by their shares. While the shares are constant, some source moves at least as far
as the total (Kitagawa 1955).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rollback.detect.channel import Channel
from rollback.detect.constants import HIGH_RISE

VIEW_POINTS = 16
BEFORE_POINTS = 64
MIX_POINTS = 24  # points after the onset before a mixture is blamed
SOURCE_SHARE = 0.5  # of the total's rise: a source that moved so far explains the rise
STANDARD_ERROR = 0.28  # of a difference of two means, 16 against 64 points, in units of one point's noise
MIXTURE = "no source moved as far as the total"


def source_sentence(sources: Mapping[str, Channel], since_row: int) -> str | None:
    """Return `moved: loss/cm4; not loss/pmd`; None where the sources do not differ."""
    moved, still = [], []
    for name, channel in sources.items():
        shift = _move(channel, since_row, _highest(channel, since_row))
        if shift is None:
            continue
        if shift >= HIGH_RISE * channel.scale:
            moved.append(name)
        elif abs(shift) <= channel.scale:
            still.append(name)
    if not moved:
        return None
    if still:
        return f"moved: {', '.join(moved)}; not {', '.join(still)}"
    return f"all sources moved: {', '.join(moved)}" if len(moved) > 1 else None


def is_mixture(total: Channel, sources: Mapping[str, Channel], since_row: int) -> bool | None:
    """Whether the mixture moved the total and no source did; None where it cannot be known."""
    window = _highest(total, since_row)
    rise = _move(total, since_row, window)
    if len(sources) < 2 or rise is None:
        return None
    for channel in sources.values():
        move = _move(channel, since_row, window)
        if move is None:
            return None
        if move + STANDARD_ERROR * channel.scale > SOURCE_SHARE * rise:
            return False
    return True


def _highest(channel: Channel, since_row: int) -> range:
    """The rows of the first or the last points since then, whichever are higher: a spike is over when its event closes."""
    since = [item for item in channel.buffer if item[0] >= since_row]
    if not since:
        return range(0)
    first, last = since[:VIEW_POINTS], since[-VIEW_POINTS:]
    part = max(first, last, key=lambda items: math.fsum(item[2] for item in items))
    return range(part[0][0], part[-1][0] + 1)


def _move(channel: Channel, since_row: int, window: range) -> float | None:
    """The mean over the window of rows minus the mean before; None without enough points on both sides."""
    before = [item[2] for item in channel.buffer if item[0] < since_row][-BEFORE_POINTS:]
    after = [item[2] for item in channel.buffer if item[0] in window]
    if len(before) < VIEW_POINTS or not after or channel.scale <= 0.0:
        return None
    return _mean(after) - _mean(before)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
