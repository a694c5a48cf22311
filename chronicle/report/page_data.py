"""What the HTML page draws, as one JSON value: curves thinned to a budget, marks, windows, cards, tables. Pure.

Values are rounded to five digits and steps sent once per curve; wall clock, samples and FLOPs are sent once per launch as
functions of the step, and the page interpolates. 500k steps × 13 launches × 8 channels stay below 5 MB.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from chronicle.journal import Entry
from chronicle.report.markup import anchor_of
from chronicle.report.lineage_picture import PALETTE
from chronicle.report.page_cards import incident_cards, incident_row, short
from chronicle.report.page_curves import channel_curves, cut
from chronicle.story.assemble import LOSS_NAMES, Story
from chronicle.story.clocks import Clock, flops_are_estimated, tell_clocks
from chronicle.story.launches import LaunchStory
from chronicle.story.plain import format_factor, plain
from chronicle.story.learning import Progress, tell_progress
from chronicle.story.resumes import ResumeWindow, resume_windows, would_have_resumed_at
from chronicle.story.series import LaunchSeries, shown_range

__all__ = ["build_page_data", "drawn"]

CHANNELS = 40
MOST_BRANCHES = 1_000  # of the launch graph: several a pixel already; of more launches every nth is drawn
SOURCE_PREFIXES = ("loss/", "loss.", "share/", "ratio/")
HEALTH_WORDS = ("grad", "norm", "z_loss", "loss_scale", "update", "adam", "variance", "clip")


def build_page_data(
    story: Story,
    series: Sequence[LaunchSeries],
    lost_seconds: Mapping[str, float],
    panels: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Everything the page's script needs; text is plain (the page sets it as text, never as markup)."""
    names, clocks = _names(series), tell_clocks(story, series)
    return {
        "v": 1,
        "run": plain(story.run),
        "head": {"step": story.headline.step, "launch": story.headline.launch},
        "loss": next((n for n in LOSS_NAMES if n in names), None),
        "channels": names,
        "launches": [_launch(story, launch) for launch in story.launches],
        "every": math.ceil(len(story.launches) / MOST_BRANCHES) or 1,
        "curves": {name: channel_curves(story, series, name) for name in names},
        "clocks": [_clock(c) for c in clocks],
        "flopsEstimated": flops_are_estimated(series),
        "ranges": {name: _range(story, series, name) for name in names},
        "rollbacks": _rollbacks(story, lost_seconds),
        "restarts": _restarts(story),
        "incidents": [incident_row(matter) for matter in story.matters],
        "hardware": [_hardware(story, entry) for entry in story.hardware],
        "resumes": [_resume(window) for window in resume_windows(story, series)],
        "cards": incident_cards(story, series),
        "groups": {"sources": _sources(names), "health": _health(names)},
        "progress": _progress(tell_progress(story, series)),
        "studies": list(panels),
    }


# of the rows that the tables show, what the script needs: of 10^4 launches the rest is megabytes
DRAWN: Mapping[str, Sequence[str]] = {
    "launches": ("number", "start", "last", "keptTo", "parent", "stood", "lr", "why", "outcome", "colour"),
    "rollbacks": ("launch", "to"),
    "incidents": ("launch", "onset", "title"),
}


def drawn(data: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the data that the page's script draws from; the tables are in the page already."""
    return {**data, **{name: [{key: row[key] for key in keys} for row in data[name]] for name, keys in DRAWN.items()}}


def _names(series: Sequence[LaunchSeries]) -> list[str]:
    counted: dict[str, int] = {}
    for launch in series:
        for name, curve in launch.channels.items():
            counted[name] = counted.get(name, 0) + len(curve.steps)
    first = [n for n in (*LOSS_NAMES, "lr") if n in counted]
    rest = sorted((n for n in counted if n not in first), key=lambda n: (-counted[n], n))
    return (first + rest)[:CHANNELS]


def _launch(story: Story, launch: LaunchStory) -> dict[str, Any]:
    span = launch.span
    return {
        "number": launch.number,
        "start": span.start_step,
        "last": span.last_step,
        "keptTo": span.last_step if span.abandoned_after is None else span.abandoned_after,
        "parent": span.parent,
        "stood": None if span.has_steps or launch.alive else would_have_resumed_at(story, launch),
        "lr": "" if launch.lr is None else format_factor(launch.lr.factor),
        "why": "" if launch.lr is None else plain(launch.lr.reason),
        "outcome": plain(launch.outcome),
        "guard": plain(launch.verdict or ("no guard" if launch.resumed else "")),
        "started": plain(launch.started),
        "colour": PALETTE[(launch.number - 1) % len(PALETTE)],
    }


def _clock(clock: Clock) -> dict[str, Any]:
    """Step -> seconds since the epoch, samples, FLOPs; an axis that nobody knows is left out."""
    steps, times = clock.time
    out: dict[str, Any] = {"launch": clock.launch, "time": [steps, [round(v, 1) for v in times]]}
    for axis, (at, values) in (("samples", clock.samples), ("flops", clock.flops)):
        if at:
            out[axis] = [at, [short(v) for v in values]]
    return out


def _range(story: Story, series: Sequence[LaunchSeries], name: str) -> list[float]:
    parts = cut(story, series, name).values()
    kept, gone = ([v for both in parts for v in both[side].values] for side in (0, 1))
    if name == "lr":  # an abandoned LR was often the reason: never clipped
        top = max((v for v in (*kept, *gone) if math.isfinite(v)), default=1.0)
        return [0.0, 1.15 * top or 1.0]
    return list(shown_range(kept, gone))


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
        if launch.resumed and launch.span.start_step not in targets
    ]


def _resume(window: ResumeWindow) -> dict[str, Any]:
    return {
        "launch": window.launch,
        "step": window.step,
        "x": list(window.offsets),
        "y": [short(v) for v in window.excess],
        "bump": None if window.bump is None else short(window.bump),
        "halfLife": window.half_life_steps,
        "shifts": [
            {"channel": plain(s.channel), "before": short(s.before), "after": short(s.after), "sigmas": round(s.sigmas, 1)}
            for s in window.shifts[:8]
        ],
    }


def _sources(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.startswith(SOURCE_PREFIXES)]


def _health(names: Sequence[str]) -> list[str]:
    return [name for name in names if any(word in name.lower() for word in HEALTH_WORDS) and name not in _sources(names)]


def _progress(progress: Progress) -> dict[str, Any]:
    return {
        "s": list(progress.steps),
        "v": [short(v) for v in progress.medians],
        "masked": progress.masked_points,
        "slope": progress.slope_per_1000,
        "error": progress.slope_error,
        "plateau": progress.plateau,
        "distinct": progress.distinct_values,
    }
