"""What else than steps a run can be measured in: wall clock, samples, FLOPs, each as a function of a launch's steps. Pure.

Logged counters come first. Where there are none, samples follow from the data plan's batch, FLOPs from the declared
parameters and the logged tokens (6 × parameters × tokens, Kaplan et al. 2020: a dense model's forward and backward pass).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from chronicle.story.assemble import Story
from chronicle.story.series import Curve, LaunchSeries, thin

__all__ = ["Clock", "flops_are_estimated", "tell_clocks"]

BUCKETS, ALL_BUCKETS = 60, 3_000  # of one launch at most, and of all: 10^4 launches have two points each
SAMPLE_NAMES = ("samples", "consumed_samples", "num_samples", "train/samples")
FLOP_NAMES = ("flops", "total_flops", "train/flops")
TOKEN_NAMES = ("tokens", "consumed_tokens", "num_tokens", "train/tokens")
FLOPS_PER_PARAMETER_AND_TOKEN = 6
Table = tuple[list[int], list[float]]  # steps, values


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """One launch; `time` is seconds since the epoch, the others count from the beginning of the run. Empty = unknown."""

    launch: int
    time: Table = field(default=([], []))
    samples: Table = field(default=([], []))
    flops: Table = field(default=([], []))


def tell_clocks(story: Story, series: Sequence[LaunchSeries]) -> tuple[Clock, ...]:
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
        none: Table = ([], [])
        tables = (_times(launch), samples.get(launch.launch, made), flops.get(launch.launch, none))
        time, counted, spent = (_thinned(table, buckets) for table in tables)
        out.append(Clock(launch=launch.launch, time=time, samples=counted, flops=spent))
    return tuple(out)


def flops_are_estimated(series: Sequence[LaunchSeries]) -> bool:
    """Whether no launch logged FLOPs itself."""
    return not any(name in launch.channels for launch in series for name in FLOP_NAMES)


def _longest(launch: LaunchSeries) -> Curve:
    return max(launch.channels.values(), key=lambda c: len(c.steps), default=Curve())


def _times(launch: LaunchSeries) -> Table:
    curve = _longest(launch)
    rows = [(s, t) for s, t in zip(curve.steps, curve.times, strict=True) if t is not None]
    return [s for s, _ in rows], [t for _, t in rows]


def _thinned(table: Table, buckets: int) -> Table:
    steps, values = table
    curve = thin(Curve(steps, [None] * len(steps), values), buckets)
    return curve.steps, curve.values


def _counters(story: Story, series: Sequence[LaunchSeries], names: Sequence[str]) -> dict[int, Table]:
    """A logged counter by launch. One that begins anew at a resume is carried on from where its parent stood."""
    found: dict[int, Table] = {}
    for launch in series:
        name = next((n for n in names if n in launch.channels), None)
        if name is None:
            continue
        steps, values = launch.channels[name].steps, launch.channels[name].values
        base = _stood(story, found, launch.launch)
        if base is not None and values and values[0] < base:
            values = [base + value for value in values]
        found[launch.launch] = (steps, values)
    return found


def _stood(story: Story, found: Mapping[int, Table], number: int) -> float | None:
    told = story.launch(number)
    parent = None if told is None else told.span.parent
    if told is None or parent is None or parent not in found or told.span.start_step is None:
        return None
    steps, values = found[parent]
    before = [v for s, v in zip(steps, values, strict=True) if s <= told.span.start_step]
    return before[-1] if before else None


def _newest(story: Story, kind: str, read: Callable[[Mapping[str, object]], object]) -> float | None:
    """The newest entry of a kind that says a positive number."""
    for entry in reversed(story.entries):
        value = read(entry.data) if entry.kind == kind else None
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return float(value)
    return None


def _samples_per_step(story: Story) -> float | None:
    return _newest(story, "data.start", lambda data: _inside(data, "plan").get("batch_size"))


def _parameters(story: Story) -> float | None:
    return _newest(story, "plan", lambda data: _inside(data, "declared").get("params"))


def _inside(data: Mapping[str, object], name: str) -> Mapping[str, object]:
    inner = data.get(name)
    return inner if isinstance(inner, Mapping) else {}
