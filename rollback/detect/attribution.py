"""What stands beside an event: which data sources moved, a restart just before it, a wrong learning rate.

Evidence, not verdicts: short sentences in the event. One verdict is drawn here: where the total moved and no source
did as much, the mixture moved (Simpson's paradox as a training incident).
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
SOURCE_SHARE = 0.5  # of the total's rise: a source that moved so far is part of the trouble
MIXTURE = "no source moved like the total"
STANDARD_ERROR = 0.28  # of a difference of two means, 16 against 64 points, in units of one point's noise


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


def mixture_sentence(
    total: Channel, sources: Mapping[str, Channel], shares: Mapping[str, Sequence[tuple[int, float]]], since_row: int
) -> str | None:
    """Say that the mixture moved the total; empty where a source did, None where nobody can know (any more).

    The total is the sources' mean weighted by their shares: while these stay, some source moves at least as far as the
    total (Kitagawa 1955). Where shares are logged they must have changed too.
    """
    since = [item for item in total.buffer if item[0] >= since_row]
    if len(sources) < 2 or not since:
        return None
    after = max(since[:VIEW_POINTS], since[-VIEW_POINTS:], key=lambda part: math.fsum(item[3] for item in part))
    window = after[0][0], after[-1][0]
    rise = _move(total, since_row, window)
    moves = [(_move(channel, since_row, window), channel.scale) for channel in sources.values()]
    if rise is None or any(move is None for move, _ in moves):
        return None
    if any((move or 0.0) + STANDARD_ERROR * scale > SOURCE_SHARE * rise for move, scale in moves):
        return ""
    changed = _changed_shares(shares, since_row)
    if shares and not changed:
        return ""
    return MIXTURE + (f", shares did: {', '.join(changed)}" if changed else "")


def _move(channel: Channel, since_row: int, window: tuple[int, int]) -> float | None:
    """The mean over the window of rows minus the mean before; None without enough points on both sides."""
    before = [item[3] for item in channel.buffer if item[0] < since_row][-4 * VIEW_POINTS :]
    after = [item[3] for item in channel.buffer if window[0] <= item[0] <= window[1]]
    if len(before) < VIEW_POINTS or not after or channel.scale <= 0.0:
        return None
    return math.fsum(after) / len(after) - math.fsum(before) / len(before)


def _changed_shares(shares: Mapping[str, Sequence[tuple[int, float]]], since_row: int) -> tuple[str, ...]:
    """Names of mixture shares that differ by more than two per cent of the whole from what they were before the row."""
    names = []
    for name, points in shares.items():
        before = [value for row, value in points if row < since_row][-4 * VIEW_POINTS :]
        after = [value for row, value in points if row >= since_row]
        if before and after and abs(math.fsum(after) / len(after) - math.fsum(before) / len(before)) > WEIGHT_CHANGE:
            names.append(name)
    return tuple(names)
