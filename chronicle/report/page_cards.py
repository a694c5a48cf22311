"""The incident cards of the HTML page: what moved, from two checkpoints before the onset, and where one could go. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from chronicle.report.markup import anchor_of
from chronicle.story.assemble import LOSS_NAMES, Story
from chronicle.story.matters import Matter, event_of
from chronicle.story.plain import plain
from chronicle.story.series import Curve, LaunchSeries, thin

__all__ = ["incident_cards", "incident_row", "packed", "short"]

CARDS = 24
CARD_BUCKETS = 120


def incident_cards(story: Story, series: Sequence[LaunchSeries]) -> list[dict[str, Any]]:
    """Loud incidents first, newest kept."""
    order = {"propose": 0, "warn": 1}
    newest_first = story.matters[::-1]
    loud = sorted(newest_first, key=lambda m: order.get(str(event_of(m.entry).get("tier")), 2))
    by_launch = {s.launch: s.channels for s in series}
    cards = (_card(story, matter, by_launch.get(matter.entry.launch or -1, {})) for matter in loud[:CARDS])
    return [card for card in cards if card is not None]


def _card(story: Story, matter: Matter, channels: Mapping[str, Curve]) -> dict[str, Any] | None:
    onset, launch, name = matter.onset, story.launch(matter.entry.launch), _channel(matter, channels)
    if name is None or launch is None or onset is None:
        return None
    steps = sorted(saved.step for saved in launch.checkpoints)
    before = [s for s in steps if s < onset][-2:]
    last = launch.span.last_step or onset
    low = before[0] - 5 if before else onset - max(20, (last - onset) // 3)
    high = min(last, onset + max(3 * (onset - low), 60))
    curve = packed(thin(channels[name].between(low, high), CARD_BUCKETS))
    near = [s for s in steps if low <= s <= high]
    chosen = [] if matter.answer is None else [matter.answer.to_step]
    return {**incident_row(matter), "channel": plain(name), "curve": curve, "checkpoints": near, "chosen": chosen}


def _channel(matter: Matter, channels: Mapping[str, Curve]) -> str | None:
    """The first channel that the detector named and somebody logged; else the loss."""
    named = event_of(matter.entry).get("channels")
    wanted = [str(name) for name in named] if isinstance(named, list | tuple) else []
    return next((name for name in (*wanted, *LOSS_NAMES) if name in channels), None)


def incident_row(matter: Matter) -> dict[str, Any]:
    """One incident as the table shows it."""
    event, entry = event_of(matter.entry), matter.entry
    return {
        "id": anchor_of(matter.first_id),
        "title": plain(entry.title),
        "launch": entry.launch,
        "onset": matter.onset,
        "low": event.get("onset_low_step") if isinstance(event.get("onset_low_step"), int) else None,
        "tier": plain(event.get("tier") or ""),
        "kind": plain(event.get("kind") or ""),
        "outcome": plain(matter.standing),
    }


def packed(curve: Curve) -> dict[str, Any]:
    """Steps and shortened values."""
    return {"s": curve.steps, "v": [short(value) for value in curve.values]}


def short(value: float) -> float | int | None:
    """Five digits; None, a gap in the line, for what is no number."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e9 else rounded
