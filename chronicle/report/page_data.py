"""The data of the HTML page as one JSON value: incident cards, thinned curves, marks, clocks, tables.

Curves are thinned to a budget of points, so that a page stays small however many steps, launches and channels there are:
500k steps × 13 launches × 8 channels stay below 5 MB. Values are rounded to five digits, steps are sent once per curve. Up to
`MANY` launches each get a share of the points by their length; of more launches the kept parts are thinned together as one
curve, and so are the abandoned parts.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chronicle.journal import Entry
from chronicle.report.markup import anchor_of
from chronicle.story.assemble import LaunchStory, Story
from chronicle.story.learning import ResumeWindow, resume_windows, would_have_resumed_at
from chronicle.story.matters import Matter, event_of, incident_detail, incident_title
from chronicle.story.plain import format_factor, plain
from chronicle.story.series import (
    MACHINE_CHANNELS,
    ChannelCurve,
    LaunchSeries,
    ParentSeries,
    TimeAxis,
    flops_are_estimated,
    shown_range,
    smooth,
    tell_clocks,
    thin,
)
from rollback.channels import Role, find_channel, is_health, is_held_out, role_of

# Of launches: neither red (an incident) nor violet (hardware) nor grey (abandoned). Neighbours, and the first four among them,
# are 16 or more apart (CIE76) for normal, protan, deutan and tritan sight (Machado 2009), and 10 or more from the red
PALETTE = ("#2f6fb0", "#d9822b", "#3c9a5f", "#72591d", "#1c5fc4", "#5c99d6", "#6aa117", "#1d7225", "#4ea6bc", "#a98560")
CARDS, FEW_CARDS = 24, 6  # notices have a card only where there are fewer than so many others
CARD_BUCKETS = 120
POINTS = 8_000  # of one channel over all launches: finer than a screen, fast as SVG; 40 channels are below 5 MB
MANY, MANY_POINTS = 200, 2_000  # with that many launches most points are single, and a dot costs as much as a line
LEAST_BUCKETS = 6
SMOOTHED_POINTS, SMOOTH_BINS = 120, 160
CHANNELS = 40
MOST_BRANCHES = 1_000  # of the launch graph, several per pixel; of more launches every nth is drawn
MOST_HELD_OUT = 3
SPREAD = 1_000.0
MACHINE = re.compile(
    r"^(system|gpu|cpu|node|host|disk|net|power)[/_.]|(^|[/_.])(memory|mem|power|utili[sz]ation|temperature)([/_.]|$)"
)
SOURCE_PREFIXES = ("loss/", "loss.", "share/", "ratio/")
# Of the rows in the tables, the fields that the script draws: with 10^4 launches the others are megabytes
DRAWN: Mapping[str, Sequence[str]] = {
    "launches": ("number", "start", "last", "keptTo", "parent", "inferred", "stood", "lr", "why", "outcome", "colour"),
    "rollbacks": ("launch", "to"),
    "incidents": ("launch", "onset", "title", "tier"),
}


# --- incident cards -----------------------------------------------------------------------------------------------------


def incident_cards(story: Story, series: Sequence[LaunchSeries]) -> list[dict[str, Any]]:
    """At most `CARDS` incidents, the most serious and newest ones; notices only as far as there are few others."""
    order = {"propose": 0, "warn": 1, "notice": 3}
    newest_first = story.matters[::-1]
    ordered = sorted(newest_first, key=lambda matter: order.get(event_of(matter.entry).tier, 2))
    loud = [matter for matter in ordered if event_of(matter.entry).tier != "notice"]
    chosen = ordered[: max(min(len(loud), CARDS), FEW_CARDS)]
    by_launch = {s.launch: s.channels for s in series}
    cards = (_card(story, matter, by_launch.get(matter.entry.launch or -1, {})) for matter in chosen)
    return [card for card in cards if card is not None]


def _card(story: Story, matter: Matter, channels: Mapping[str, ChannelCurve]) -> dict[str, Any] | None:
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


def _channel(matter: Matter, channels: Mapping[str, ChannelCurve]) -> str | None:
    """The first of the incident's channels that was logged, else the loss."""
    named = next((name for name in event_of(matter.entry).channels if name in channels), None)
    return find_channel(channels, Role.LOSS) if named is None else named


def incident_row(matter: Matter) -> dict[str, Any]:
    """One row of the table of incidents."""
    event, entry = event_of(matter.entry), matter.entry
    return {
        "id": anchor_of(matter.first_id),
        "title": plain(incident_title(entry)),
        "words": plain(matter.words),
        "detail": plain(incident_detail(entry)),
        "launch": entry.launch,
        "onset": matter.onset,
        "low": event.onset_low_step,
        "tier": plain(event.tier),
        "kind": plain(event.kind),
        "outcome": plain(matter.standing),
    }


def packed(curve: ChannelCurve) -> dict[str, Any]:
    """Steps and shortened values."""
    return {"s": curve.steps, "v": [short(value) for value in curve.values]}


def short(value: float) -> float | int | None:
    """A value with five digits; None (a gap in the line) for NaN and infinities."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e9 else rounded


# --- curves -------------------------------------------------------------------------------------------------------------


Parts = Mapping[int, tuple[ChannelCurve, ChannelCurve]]  # the kept and the abandoned part of a channel, by launch


def channel_curves(parts: Parts) -> list[dict[str, Any]]:
    """One row per launch that logged the channel: its `kept`, `gone` (abandoned) and `drift` (smoothed) curves."""
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


def cut(story: Story, series: Sequence[LaunchSeries], name: str) -> Parts:
    """A channel in its two parts."""
    parts = {}
    for launch in series:
        curve, told = launch.channels.get(name), story.launch(launch.launch)
        if curve is not None and told is not None:
            parts[launch.launch] = curve.parted(told)
    return parts


def _thinned(curves: Mapping[int, ChannelCurve], total: int) -> dict[int, ChannelCurve]:
    if len(curves) <= MANY:
        return {n: thin(curve, max(LEAST_BUCKETS, POINTS // 4 * len(curve.steps) // total)) for n, curve in curves.items()}
    rows = [(n, i) for n, curve in curves.items() for i in range(len(curve.steps))]
    values = [value for curve in curves.values() for value in curve.values]
    line = thin(ChannelCurve(list(range(len(rows))), [None] * len(rows), values), max(1, MANY_POINTS // 4 * len(rows) // total))
    found: dict[int, ChannelCurve] = {}
    for place in line.steps:
        launch, i = rows[place]
        whole = curves[launch]
        found.setdefault(launch, ChannelCurve()).add(whole.steps[i], None, whole.values[i])
    return found


# --- the page's data ----------------------------------------------------------------------------------------------------


def build_page_data(
    story: Story,
    series: Sequence[LaunchSeries],
    lost_seconds: Mapping[str, float],
    parent: ParentSeries | None = None,
) -> dict[str, Any]:
    """All data of the page. Text is plain: the script sets it as text, not as markup."""
    names, clocks = _names(series), tell_clocks(story, series)
    parts = {name: cut(story, series, name) for name in names}
    return {
        "v": 1,
        "run": plain(story.run),
        "head": {"step": story.headline.step, "launch": story.headline.launch},
        "loss": find_channel(names, Role.LOSS),
        "lr": find_channel(names, Role.LR),
        "channels": names,
        "launches": [_launch(story, launch) for launch in story.launches],
        "every": math.ceil(len(story.launches) / MOST_BRANCHES) or 1,
        "curves": {name: channel_curves(parts[name]) for name in names},
        "clocks": [_clock(c) for c in clocks],
        "flopsEstimated": flops_are_estimated(series),
        "parent": _parent(parent, names),
        "ranges": {name: _range(parts[name], name, parent) for name in names},
        "spread": [name for name in names if _spreads(parts[name])],
        "rollbacks": _rollbacks(story, lost_seconds),
        "restarts": _restarts(story),
        "incidents": [incident_row(matter) for matter in story.matters],
        "hardware": [_hardware(story, entry) for entry in story.hardware],
        "resumes": [_resume(window) for window in resume_windows(story, series)],
        "cards": incident_cards(story, series),
        "groups": _groups(names),
        "evals": _held_out(names),
    }


def drawn(data: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the data that the script draws; the tables are already in the page."""
    return {**data, **{name: [{key: row[key] for key in keys} for row in data[name]] for name, keys in DRAWN.items()}}


def _names(series: Sequence[LaunchSeries]) -> list[str]:
    counted: dict[str, int] = {}
    for launch in series:
        for name, curve in launch.channels.items():
            counted[name] = counted.get(name, 0) + len(curve.steps)
    first = [n for role in (Role.LOSS, Role.LR) if (n := find_channel(counted, role)) is not None]
    rest = sorted((n for n in counted if n not in first), key=lambda n: (-counted[n], n))
    machine = [name for name in rest if name in MACHINE_CHANNELS]
    return (first + [name for name in rest if name not in machine])[:CHANNELS] + machine


def _launch(story: Story, launch: LaunchStory) -> dict[str, Any]:
    span = launch.span
    return {
        "number": launch.number,
        "start": span.start_step,
        "last": span.last_step,
        "keptTo": span.last_step if span.abandoned_after is None else span.abandoned_after,
        "parent": span.parent,
        "inferred": story.lineage.is_guess(span),
        "stood": None if span.has_steps or launch.alive else would_have_resumed_at(story, launch),
        "lr": "" if launch.lr is None else format_factor(launch.lr.factor),
        "why": "" if launch.lr is None else plain(launch.lr.reason),
        "outcome": plain(launch.outcome),
        "guard": plain(launch.verdict or ("no guard" if launch.resumed else "")),
        "started": plain(launch.started) if story.is_dated else "",
        "colour": PALETTE[(launch.number - 1) % len(PALETTE)],
    }


def _clock(clock: TimeAxis) -> dict[str, Any]:
    """Step -> seconds since the epoch, samples, FLOPs; unknown axes are left out."""
    steps, times = clock.time
    out: dict[str, Any] = {"launch": clock.launch, "time": [steps, [round(v, 1) for v in times]]}
    for axis, (at, values) in (("samples", clock.samples), ("flops", clock.flops)):
        if at:
            out[axis] = [at, [short(v) for v in values]]
    return out


def _parent(parent: ParentSeries | None, names: Iterable[str]) -> dict[str, Any] | None:
    """The curves of the run that this one begins from, for the channels that both logged."""
    if parent is None:
        return None
    curves = {name: packed(thin(parent.channels[name], POINTS // 4)) for name in names if name in parent.channels}
    return {"name": parent.name, "words": parent.words, "curves": curves}


def _values(parts: Parts, side: int) -> list[float]:
    return [value for both in parts.values() for value in both[side].values]


def _range(parts: Parts, name: str, parent: ParentSeries | None) -> list[float]:
    kept, gone = _values(parts, 0), _values(parts, 1)
    kept += parent.channels[name].values if parent is not None and name in parent.channels else []
    if role_of(name) is Role.LR:  # not clipped: an abandoned LR was often the reason for a rollback
        top = max((v for v in (*kept, *gone) if math.isfinite(v)), default=1.0)
        return [0.0, 1.15 * top or 1.0]
    return list(shown_range(kept, gone))


def _spreads(parts: Parts) -> bool:
    """Whether a linear axis would show one part of the channel only: the highest is 1,000 times the middle, or more."""
    values = sorted(value for value in (*_values(parts, 0), *_values(parts, 1)) if math.isfinite(value))
    return bool(values) and values[0] > 0 and values[-1] >= SPREAD * values[len(values) // 2]


def _rollbacks(story: Story, lost_seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    return [
        {
            "launch": story.lineage.owner(mark.to_step),
            "to": mark.to_step,
            "from": mark.from_step,
            "lost": max(0, mark.from_step - mark.to_step),
            "seconds": lost_seconds.get(mark.entry_id),
            "anchor": anchor_of(mark.entry_id),
        }
        for mark in story.lineage.rollbacks
    ]


def _hardware(story: Story, entry: Entry) -> dict[str, Any]:
    return {"launch": story.lineage.owner(entry.step or 0), "step": entry.step, "title": plain(entry.title)}


def _restarts(story: Story) -> list[dict[str, Any]]:
    targets = {mark.to_step for mark in story.lineage.rollbacks}
    return [
        {"step": launch.span.start_step, "launch": launch.number}
        for launch in story.launches
        if launch.resumed and launch.span.start_step not in targets and not (launch.imported and launch.span.parent is None)
    ]


def _resume(window: ResumeWindow) -> dict[str, Any]:
    return {
        "launch": window.launch,
        "step": window.step,
        "x": list(window.offsets),
        "y": [short(v) for v in window.excess],
        "bump": None if window.bump is None else short(window.bump),
        "halfLife": window.half_life_steps,
        "shifts": [{"channel": plain(shift.channel), "sigmas": round(shift.sigmas, 1)} for shift in window.shifts[:8]],
    }


def _groups(names: Sequence[str]) -> dict[str, list[str]]:
    """The channels that have a section of their own: of data sources, of the optimizer's health, of what the machine did."""
    sources = [name for name in names if name.startswith(SOURCE_PREFIXES) and not is_held_out(name)]
    health = [name for name in names if is_health(name) and name not in sources]
    machine = [name for name in names if MACHINE.search(name) or role_of(name) is Role.SPEED]
    return {"sources": sources, "health": health, "machine": machine}


def _held_out(names: Sequence[str]) -> list[str]:
    """Losses on data that is not trained on, which are drawn beside the training loss."""
    return [name for name in names if is_held_out(name)][:MOST_HELD_OUT]
