"""Whole curves: every channel of every launch as columns, thinned for plots, and the clocks they can be drawn over.

Thinning keeps the first, lowest, highest and last point of each group of neighbours (M4, Jugel et al. 2014), so that a spike
of one step is kept. No numpy: `render --check` runs without it. Clocks (wall time, samples, FLOPs) come from logged
counters. Without them, samples are computed from the data plan's batch, and FLOPs as 6 × parameters × tokens (Kaplan et al.
2020, dense models).
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.journal.events import DataStart, GuardVerdict, PlanDeclared, events_of
from chronicle.journal.place import Parent, describe_parent, find_run, read_place
from chronicle.metrics import read_metrics
from chronicle.paths import RunPaths
from chronicle.story.assemble import LaunchStory, Story
from chronicle.story.plain import plain
from chronicle.story.read import read_story

ROOM_FOR_ABANDONED = 0.6  # of the kept range
FOREVER = 1 << 62


@dataclass(frozen=True, slots=True)
class ChannelCurve:
    """One channel of one launch. `steps`, `times` (seconds since the epoch or None) and `values` have one length."""

    steps: list[int] = field(default_factory=list)
    times: list[float | None] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def between(self, first: int, last: int) -> "ChannelCurve":
        """The points with `first <= step <= last`."""
        return self.at([i for i, step in enumerate(self.steps) if first <= step <= last])

    def at(self, rows: Sequence[int]) -> "ChannelCurve":
        """The points at these places."""
        return ChannelCurve([self.steps[i] for i in rows], [self.times[i] for i in rows], [self.values[i] for i in rows])

    def add(self, step: int, time: float | None, value: float) -> None:
        """Append a point."""
        self.steps.append(step)
        self.times.append(time)
        self.values.append(value)

    def extend(self, other: "ChannelCurve") -> None:
        """Append the points of another curve."""
        self.steps.extend(other.steps)
        self.times.extend(other.times)
        self.values.extend(other.values)

    def parted(self, launch: LaunchStory) -> "tuple[ChannelCurve, ChannelCurve]":
        """The part of this launch's curve that is kept, and the part that a rollback abandoned."""
        limit = FOREVER if launch.span.abandoned_after is None else launch.span.abandoned_after
        return self.between(0, limit), self.between(limit + 1, FOREVER)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSeries:
    """All channels of one launch."""

    launch: int
    channels: dict[str, ChannelCurve]


def read_series(paths: RunPaths, launches: Iterable[int]) -> list[LaunchSeries]:
    """The curves of these launches; a launch without a log has no channels."""
    return [LaunchSeries(launch=n, channels=_read(paths.metrics_path(n))) for n in launches]


def _read(path: Path) -> dict[str, ChannelCurve]:
    channels: dict[str, ChannelCurve] = {}
    try:
        for point in read_metrics(path):
            for name, value in point.values.items():
                curve = channels.get(name)
                if curve is None:
                    curve = channels[name] = ChannelCurve()
                curve.add(point.step, point.time, value)
    except FileNotFoundError:
        pass  # a launch that died before its first step logged nothing
    return channels


# --- what the machines did ------------------------------------------------------------------------------------------------

GIGA, MEGA = 1e9, 1e6
SAMPLE_BIN_SECONDS = 30.0
# channel -> (kind and field of the sample, factor, how the hosts or devices of one moment are put together)
MACHINE_CHANNELS: Mapping[str, tuple[str, str, float, Callable[[Sequence[float]], float]]] = {
    "gpu/busy %": ("device", "busy_fraction", 100, mean),
    "gpu/least busy %": ("device", "busy_fraction", 100, min),
    "gpu/memory GB": ("device", "memory_bytes", 1 / GIGA, max),
    "gpu/power W": ("device", "power_watts", 1, mean),
    "gpu/temperature °C": ("device", "temperature_celsius", 1, max),
    "host/cpu %": ("host", "cpu_fraction", 100, mean),
    "host/memory %": ("host", "memory_fraction", 100, max),
    "host/memory GB": ("host", "memory_bytes", 1 / GIGA, max),
}


def read_machine(paths: RunPaths, launch: int, start_step: int) -> dict[str, ChannelCurve]:
    """What the supervisors of a launch sampled, as curves over the step; before the first logged step: the start step.

    Each host or device counts once in half a minute, by its mean. A channel puts them together: `gpu/busy %` is the mean of
    all GPUs of the launch, `gpu/memory GB` the fullest one.
    """
    moments: dict[int, dict[tuple[str, str], dict[str, list[float]]]] = {}
    steps: dict[int, int] = {}
    for path in sorted((paths.launch_dir(launch) / "evidence").glob("host-*.jsonl")):
        for record in _samples(path):
            moment, step = int(record["t"] // SAMPLE_BIN_SECONDS), record.get("step")
            known = int(step) if type(step) is int else start_step
            steps[moment] = max(steps.get(moment, known), known)
            whose = (str(record["kind"]), f"{record.get('host')} {record.get('device')}")
            one = moments.setdefault(moment, {}).setdefault(whose, {})
            for name, value in record.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    one.setdefault(name, []).append(float(value))
    channels: dict[str, ChannelCurve] = {}
    for moment, ones in sorted(moments.items()):
        for channel, (kind, name, factor, together) in MACHINE_CHANNELS.items():
            values = [mean(fields[name]) for (of, _), fields in ones.items() if of == kind and name in fields]
            if values:
                curve = channels.setdefault(channel, ChannelCurve())
                curve.add(steps[moment], moment * SAMPLE_BIN_SECONDS, factor * together(values))
    return channels


def _samples(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return
    for line in lines:
        try:
            record = json.loads(line) if line else None
        except (ValueError, RecursionError):
            continue  # a line that a full disk cut
        if isinstance(record, dict) and isinstance(record.get("t"), int | float) and record.get("kind") in ("host", "device"):
            yield record


def with_machine(paths: RunPaths, story: Story, series: Sequence[LaunchSeries]) -> list[LaunchSeries]:
    """The series with what the machines did beside what the trainer logged; a name that it logged itself is left alone."""
    found = []
    for one in series:
        told = story.launch(one.launch)
        start = 0 if told is None or told.span.start_step is None else told.span.start_step
        found.append(LaunchSeries(launch=one.launch, channels=read_machine(paths, one.launch, start) | one.channels))
    return found


# --- the run that this one begins from ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentSeries:
    """What the parent logged on the way to the step that this run begins from; no channels when it is not to be found."""

    name: str
    words: str
    channels: dict[str, ChannelCurve] = field(default_factory=dict)


def read_parent(story: Story, paths: RunPaths) -> ParentSeries | None:
    """The parent's curve along the steps that the loaded checkpoint descends from. The parent is only read."""
    parent = story.parent
    if parent is None:
        return None
    words = f"begins from {plain(describe_parent(parent))}"
    directory = parent_directory(story, paths, parent)
    try:
        told = None if directory is None else read_story(RunPaths(directory), signs_of_life=False)
        channels = {} if directory is None or told is None else ancestry(told, RunPaths(directory), parent.launch, parent.step)
    except (ChronicleError, OSError) as problem:
        return ParentSeries(name=plain(parent.run), words=f"{words}; that run cannot be read ({plain(problem)})")
    missing = "" if told is not None else "; that run is not here, so its curve is not drawn"
    return ParentSeries(name=plain(parent.run), words=words + missing, channels=channels)


def parent_directory(story: Story, paths: RunPaths, parent: Parent) -> Path | None:
    """Where the parent lies: as recorded, beside this run, or in the project of the checkpoint that was loaded."""
    if not parent.run_id:
        return None
    try:
        place = read_place(RunPaths(Path(parent.path))) if parent.path else None
    except ChronicleError:
        place = None
    if place is not None and place.run_id == parent.run_id:
        return Path(parent.path)
    verdicts = [event for _, event in events_of(story.entries, GuardVerdict) if event.loaded.get("run_id") == parent.run_id]
    loaded = [Path(event.checkpoint) for event in verdicts[:1] if event.checkpoint]
    found = find_run(parent.run_id, (paths.run_dir.parent, *(folder / "logs" for path in loaded for folder in path.parents)))
    return Path(found) if found else None


def descent(story: Story, launch: int | None, step: int | None) -> Iterator[tuple[int, int, int]]:
    """(launch, first, last) of the steps that this step of this launch descends from, itself included, the newest first."""
    while launch is not None and step is not None:
        told = story.launch(launch)
        if told is None or told.span.start_step is None:
            return
        if step > told.span.start_step:
            yield launch, told.span.start_step + 1, step
        launch, step = told.span.parent, min(step, told.span.start_step)


def ancestry(story: Story, paths: RunPaths, launch: int | None, step: int | None) -> dict[str, ChannelCurve]:
    """The channels along the steps that this step of this launch descends from."""
    channels: dict[str, ChannelCurve] = {}
    for number, first, last in reversed(list(descent(story, launch, step))):
        for name, curve in _read(paths.metrics_path(number)).items():
            channels.setdefault(name, ChannelCurve()).extend(curve.between(first, last))
    return channels


# --- thinning -----------------------------------------------------------------------------------------------------------


def thin(curve: ChannelCurve, buckets: int) -> ChannelCurve:
    """At most four points per bucket; non-finite values are kept as gaps."""
    count = len(curve.steps)
    if count <= 4 * buckets:
        return curve
    rows: list[int] = []
    for bucket in range(buckets):
        low, high = bucket * count // buckets, (bucket + 1) * count // buckets
        rows += _corners(curve.values, low, high)
    return curve.at(rows)


def _corners(values: Sequence[float], low: int, high: int) -> list[int]:
    finite = [i for i in range(low, high) if math.isfinite(values[i])]
    if not finite:
        return [low]
    chosen = {low, high - 1, min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    chosen |= {i for i in range(low, high) if not math.isfinite(values[i])} if len(finite) < high - low <= 8 else set()
    return sorted(chosen)


def smooth(curve: ChannelCurve, bins: int, least_points: int) -> ChannelCurve:
    """Medians of neighbouring points, so that noise does not hide a drift; empty for short or smooth curves."""
    if len(curve.steps) < least_points or bins < 1 or not _is_noisy(curve.values):
        return ChannelCurve()
    width = max(8, len(curve.steps) // bins)
    rows = [slice(i, i + width) for i in range(0, len(curve.steps) - width + 1, width)]
    middles = [curve.steps[part.start + width // 2] for part in rows]
    return ChannelCurve(middles, [None] * len(rows), [median(curve.values[part]) for part in rows])


def _is_noisy(values: Sequence[float]) -> bool:
    """Whether the values go up and down. A schedule or a counter, which has steps and ramps, is not noisy."""
    moves = [b - a for a, b in pairwise(values) if b != a]
    turns = sum(1 for a, b in pairwise(moves) if (a > 0) != (b > 0))
    return turns > len(values) // 8


def shown_range(kept: Sequence[float], abandoned: Iterable[float]) -> tuple[float, float]:
    """The range of an axis: that of the kept points, widened by at most `ROOM_FOR_ABANDONED` for abandoned ones."""
    gone = sorted(v for v in abandoned if math.isfinite(v))
    low, high = robust_range(kept or gone)
    if not gone or not kept:
        return low, high
    room = ROOM_FOR_ABANDONED * (high - low)
    margin = 0.05 * (high - low)
    top, bottom = gone[round(0.98 * (len(gone) - 1))] + margin, gone[round(0.02 * (len(gone) - 1))] - margin
    return max(min(low, bottom), low - room), min(max(high, top), high + room)


def robust_range(values: Iterable[float]) -> tuple[float, float]:
    """Quantiles of the finite values, widened. One outlier of 100.0 does not flatten the rest."""
    finite = sorted(v for v in values if math.isfinite(v))
    if not finite:
        return 0.0, 1.0
    bottom, top = finite[int(0.005 * (len(finite) - 1))], finite[round(0.98 * (len(finite) - 1))]
    if top <= bottom:
        span = abs(top) or 1.0
        return bottom - 0.1 * span, top + 0.1 * span
    margin = 0.15 * (top - bottom)
    return bottom - margin, top + margin


# --- clocks: wall time, samples and FLOPs as functions of the step ------------------------------------------------------


BUCKETS, ALL_BUCKETS = 60, 3_000  # of one launch at most, and of all: 10^4 launches have two points each
SAMPLE_NAMES = ("samples", "consumed_samples", "num_samples", "train/samples")
FLOP_NAMES = ("flops", "total_flops", "train/flops")
TOKEN_NAMES = ("tokens", "consumed_tokens", "num_tokens", "train/tokens", "num_input_tokens_seen", "tokens_seen")
FLOPS_PER_PARAMETER_AND_TOKEN = 6
StepValues = tuple[list[int], list[float]]  # steps, values


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAxis:
    """One launch. `time` is in seconds since the epoch, the others count from the beginning of the run. Empty: unknown."""

    launch: int
    time: StepValues = field(default=([], []))
    samples: StepValues = field(default=([], []))
    flops: StepValues = field(default=([], []))


def tell_clocks(story: Story, series: Sequence[LaunchSeries]) -> tuple[TimeAxis, ...]:
    """A clock for every launch that has curves."""
    batch, parameters = _samples_per_step(story), _parameters(story)
    samples = _counters(story, series, SAMPLE_NAMES)
    flops = _counters(story, series, FLOP_NAMES)
    if not flops and parameters is not None:
        per_token = FLOPS_PER_PARAMETER_AND_TOKEN * parameters
        tokens = _counters(story, series, TOKEN_NAMES)
        flops = {n: (steps, [per_token * v for v in values]) for n, (steps, values) in tokens.items()}
    buckets = max(1, min(BUCKETS, ALL_BUCKETS // max(1, len(series))))
    out = []
    for launch in series:
        steps = _longest(launch).steps
        made = (steps, [batch * step for step in steps]) if batch is not None and not samples else ([], [])
        none: StepValues = ([], [])
        tables = (_times(launch), samples.get(launch.launch, made), flops.get(launch.launch, none))
        time, counted, spent = (_thinned(table, buckets) for table in tables)
        out.append(TimeAxis(launch=launch.launch, time=time, samples=counted, flops=spent))
    return tuple(out)


def flops_are_estimated(series: Sequence[LaunchSeries]) -> bool:
    """Whether no launch logged FLOPs itself."""
    return not any(name in launch.channels for launch in series for name in FLOP_NAMES)


def _longest(launch: LaunchSeries) -> ChannelCurve:
    return max(launch.channels.values(), key=lambda c: len(c.steps), default=ChannelCurve())


def _times(launch: LaunchSeries) -> StepValues:
    curve = _longest(launch)
    rows = [(s, t) for s, t in zip(curve.steps, curve.times, strict=True) if t is not None]
    return [s for s, _ in rows], [t for _, t in rows]


def _thinned(table: StepValues, buckets: int) -> StepValues:
    steps, values = table
    curve = thin(ChannelCurve(steps, [None] * len(steps), values), buckets)
    return curve.steps, curve.values


def _counters(story: Story, series: Sequence[LaunchSeries], names: Sequence[str]) -> dict[int, StepValues]:
    """A logged counter by launch. If it restarts at a resume, the parent's last value is added."""
    found: dict[int, StepValues] = {}
    for launch in series:
        name = next((n for n in names if n in launch.channels), None)
        if name is None:
            continue
        steps, values = launch.channels[name].steps, launch.channels[name].values
        base = _value_at_start(story, found, launch.launch)
        if base is not None and values and values[0] < base:
            values = [base + value for value in values]
        found[launch.launch] = (steps, values)
    return found


def _value_at_start(story: Story, found: Mapping[int, StepValues], number: int) -> float | None:
    told = story.launch(number)
    parent = None if told is None else told.span.parent
    if told is None or parent is None or parent not in found or told.span.start_step is None:
        return None
    steps, values = found[parent]
    before = [v for s, v in zip(steps, values, strict=True) if s <= told.span.start_step]
    return before[-1] if before else None


def _samples_per_step(story: Story) -> float | None:
    return _newest(start.plan.get("batch_size") for _, start in events_of(story.entries, DataStart))


def _parameters(story: Story) -> float | None:
    return _newest(plan.declared.get("params") for _, plan in events_of(story.entries, PlanDeclared))


def _newest(values: Iterable[object]) -> float | None:
    """The last positive number."""
    numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool) and v > 0]
    return numbers[-1] if numbers else None
