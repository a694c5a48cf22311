"""Several runs side by side: state, last and best values, the loss at equal steps, the settings that differ, and one picture.

Of a run its lineage counts: what a rollback left behind is in no number. Of a launch (`demo@1`) all of its own steps count,
also those that were left behind: so the abandoned steps stand beside the same steps of the launch that took them again. Of
two, the difference at every common step is told with its spread. One run of each kind shows a difference and no cause: no
verdict is given; `chronicle experiment` designs a comparison that can give one.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from chronicle.errors import ChronicleError
from chronicle.report.lineage_picture import INK, RC
from chronicle.report.page_data import PALETTE
from chronicle.runs import LoggedCurve, Run
from chronicle.story.launch_settings import OUTSIDE, as_value, find_differing
from chronicle.story.plain import align_columns, format_number, plain
from chronicle.story.series import ChannelCurve, robust_range, smooth, thin
from rollback.channels import Role, find_channel, role_of

POINTS = 6  # steps at which the curves are compared
SHARE = 0.05  # of the common steps, whose median is the value at a step
SEEDS = ("seed", "random_seed", "global_seed", "manual_seed", "rng_seed")
BUCKETS, BINS, SMOOTHED = 700, 120, 120
WIDTH = 40  # letters of a setting's value


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One run, or one launch of it. `last` and `best`: (step, value); None where there is no such point.

    `launch`: its number; None for a run. `lr`: the newest logged one. None where it is not known.
    """

    name: str
    status: str
    launch: int | None
    launches: int
    abandoned: int
    lr: float | None
    steps_per_second: float | None
    channel: str
    curve: LoggedCurve
    line: ChannelCurve  # what is compared: its `steps` are steps, or seconds of training
    settings: Mapping[str, Any]
    last: tuple[int, float] | None
    best: tuple[int, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is told of some runs. `at`: (step or seconds, value of each run there, the median of the points around it)."""

    channel: str
    by: str  # "step", or "time": seconds of training, without those between launches
    members: tuple[Member, ...]
    at: tuple[tuple[int, tuple[float | None, ...]], ...]
    differing: tuple[tuple[str, tuple[Any, ...]], ...]  # (setting, its value in each run)
    num_equal: int
    spread: "Spread | None" = None  # of two: how far the second is from the first

    def to_json(self) -> dict[str, Any]:
        """The form of `--json`."""
        told = ("name", "status", "launch", "launches", "abandoned", "lr", "steps_per_second", "channel", "last", "best")
        runs = [{"points": len(one.curve), **{name: getattr(one, name) for name in told}} for one in self.members]
        at = [{self.by: place, "values": list(values)} for place, values in self.at]
        settings = [{"name": name, "values": list(values)} for name, values in self.differing]
        return {
            "v": 1,
            "channel": self.channel,
            "runs": runs,
            "at": at,
            "settings": settings,
            "equal_settings": self.num_equal,
            "difference": None if self.spread is None else self.spread._asdict(),
        }


class Spread(NamedTuple):
    """The difference of two curves over the steps that both have: its median, and between which eight tenths of it lie."""

    steps: int
    median: float
    low: float
    high: float


def compare_runs(named: Sequence[tuple[str, Run, int | None]], channel: str, by: str = "step") -> Comparison:
    """Compare runs by (label, run, launch; None: its lineage, with the settings of its last launch).

    Raises as `Run.curve`, and `ChronicleError` where a run did not record the time.
    """
    members = tuple(_member(*one, one[1].curve(channel, launch=one[2]), by) for one in named)
    names = {name for one in members for name in one.settings}.difference(OUTSIDE)
    differing = [row for row in find_differing([one.settings for one in members]) if row[0] in names]
    return Comparison(
        channel=channel,
        by=by,
        members=members,
        at=tuple(_at_equal_places(members)),
        differing=tuple(differing),
        num_equal=len(names) - len(differing),
        spread=_spread_of(*(one.curve for one in members)) if len(members) == 2 and by == "step" else None,
    )


def _spread_of(one: LoggedCurve, other: LoggedCurve) -> Spread | None:
    """The difference at every step that both have; None where they have none."""
    before = dict(zip(one.step, one.value, strict=True))
    found = []
    for step, value in zip(other.step, other.value, strict=True):
        difference = value - before.get(step, math.nan)
        if math.isfinite(difference):
            found.append(difference)
    if not found:
        return None
    found.sort()
    tenth = len(found) // 10
    return Spread(len(found), median(found), found[tenth], found[-1 - tenth])


class ComparedArm(NamedTuple):
    """Runs that differ in their seed only: `values` at the last place that all runs have reached, by seed."""

    name: str
    runs: tuple[str, ...]
    values: Mapping[int, float]


def arms_of(comparison: Comparison) -> tuple[ComparedArm, ...]:
    """The runs as arms with several seeds each; empty where they are none.

    A run belongs to an arm by its recorded settings. Settings that are another one in every run (a directory, a name) and
    copies of the seed tell no arms apart; a run without a recorded seed, or two of one arm with the same, end the search.
    """
    differing = {name: tuple(map(as_value, values)) for name, values in comparison.differing}
    seeds = [name for name in differing if name.rpartition(".")[2].lower() in SEEDS]
    if not seeds or not comparison.at:
        return ()
    by_run = differing[seeds[0]]
    telling = [
        name for name, values in differing.items()
        if name not in seeds and len(set(map(repr, values))) < len(values)
    ]  # fmt: skip
    found: dict[tuple[str, ...], dict[int, int]] = {}
    for at, seed in enumerate(by_run):
        if not isinstance(seed, int | float) or seed != int(seed):
            return ()
        arm = found.setdefault(tuple(repr(differing[name][at]) for name in telling), {})
        if int(seed) in arm:
            return ()
        arm[int(seed)] = at
    last = comparison.at[-1][1]
    arms = []
    for members in found.values():
        first = next(iter(members.values()))
        shown = [(one, dict(comparison.differing)[one][first]) for one in telling[:3]]
        name = ", ".join(f"{one}={str(value)[:WIDTH]}" for one, value in shown)
        values = {seed: value for seed, at in members.items() if (value := last[at]) is not None}
        arms.append(ComparedArm(name, tuple(comparison.members[at].name for at in members.values()), values))
    return tuple(arms) if len(arms) > 1 and all(len(arm.runs) > 1 for arm in arms) else ()


def _member(label: str, run: Run, launch: int | None, curve: LoggedCurve, by: str) -> Member:
    row = run.summary()
    finite = [(value, step) for value, step in zip(curve.value, curve.step, strict=True) if math.isfinite(value)]
    extreme = max if role_of(curve.channel) is Role.REWARD else min
    best = extreme(finite) if finite else None
    status = row["status"]
    if launch is not None:
        status = next(one.outcome for one in run.launches if one.number == launch)
    lr = _lr_of(run, launch)
    return Member(
        name=label,
        status=status,
        launch=launch,
        launches=row["launches"] if launch is None else 1,
        abandoned=row["abandoned"] if launch is None else curve.kept.count(False),
        lr=lr.value[-1] if lr.value else None,
        steps_per_second=_speed_of(curve),
        channel=curve.channel,
        curve=curve,
        line=ChannelCurve(_seconds(run, curve) if by == "time" else curve.step, curve.time, curve.value),
        settings=run.settings(launch),
        last=(curve.step[-1], curve.value[-1]) if curve.step else None,
        best=None if best is None else (best[1], best[0]),
    )


def _lr_of(run: Run, launch: int | None) -> LoggedCurve:
    """The learning rate; without points where none was logged."""
    if find_channel(run.channels, Role.LR) is None:
        return LoggedCurve("lr", [], [], [], [], [])
    return run.curve("lr", launch=launch)


def _speed_of(curve: LoggedCurve) -> float | None:
    """Steps a second: of the middle one of all intervals within a launch."""
    found = []
    for before, after in pairwise(range(len(curve))):
        began, ended = curve.time[before], curve.time[after]
        if curve.launch[before] == curve.launch[after] and began is not None and ended is not None and ended > began:
            found.append((curve.step[after] - curve.step[before]) / (ended - began))
    return median(found) if found else None


def _seconds(run: Run, curve: LoggedCurve) -> list[int]:
    """The seconds of training up to each point: within launches, because nothing is trained between them."""
    at, places = 0.0, []
    before: tuple[int, float] | None = None
    for launch, time in zip(curve.launch, curve.time, strict=True):
        if time is None:
            raise ChronicleError(f"run `{run.name}` did not record the time of every step", "compare by step")
        at += max(0.0, time - before[1]) if before is not None and before[0] == launch else 0.0
        before = (launch, time)
        places.append(round(at))
    return places


def _at_equal_places(members: Sequence[Member]) -> Iterator[tuple[int, tuple[float | None, ...]]]:
    """Places that all runs have reached, and what each had there."""
    if any(not one.line.steps for one in members):
        return
    first = max(one.line.steps[0] for one in members)
    last = min(one.line.steps[-1] for one in members)
    width = max(1.0, SHARE * (last - first))
    for part in range(1, POINTS + 1) if last > first else ():
        step = first + round((last - first) * part / POINTS)
        yield step, tuple(_around(one.line, step, width) for one in members)


def _around(curve: ChannelCurve, step: int, width: float) -> float | None:
    """The median of the finite points of the last `width` places up to this one."""
    low, high = bisect_right(curve.steps, step - width), bisect_right(curve.steps, step)
    near = [value for value in curve.values[low:high] if math.isfinite(value)]
    return median(near) if near else None


# ---- for a terminal --------------------------------------------------------------------------------------------------


def tell(comparison: Comparison) -> list[str]:
    """The comparison as tables of 80 columns and more, one column for each run."""
    members = comparison.members
    rows: list[tuple[str, ...]] = [("", *(one.name for one in members))]
    rows.append(("status", *(one.status for one in members)))
    rows.append(("launches", *(_launches(one) for one in members)))
    rows.append(("lr, last", *(_number(one.lr) for one in members)))
    rows.append(("steps a second", *(_number(one.steps_per_second) for one in members)))
    rows.append((f"{comparison.channel}, last", *(_point(one.last) for one in members)))
    rows.append((f"{comparison.channel}, best", *(_point(one.best) for one in members)))
    place_words = "  after {} s" if comparison.by == "time" else "  at step {}"
    for place, values in comparison.at:
        rows.append((place_words.format(place), *map(_number, values)))
    said = [*align_columns(rows), ""]
    if comparison.spread is not None:
        found = comparison.spread
        middle, low, high = (format_number(value) for value in found[1:])
        names = f"{members[1].name} minus {members[0].name}"
        said += [f"{names}, over {found.steps} common steps: {middle} (eight of ten between {low} and {high})", ""]
    if comparison.differing:
        total = len(comparison.differing) + comparison.num_equal
        said.append(f"settings that differ ({len(comparison.differing)} of {total}):")
        said += align_columns([(f"  {name}", *map(_setting, values)) for name, values in comparison.differing])
    elif comparison.num_equal:
        said.append(f"all {comparison.num_equal} recorded settings are equal")
    else:
        said.append("no settings were recorded: `chronicle.config({…})` in the script records them")
    return said


def _launches(one: Member) -> str:
    words = str(one.launches) if one.launch is None else f"launch {one.launch}"
    return f"{words}, {one.abandoned} steps abandoned" if one.abandoned else words


def _number(value: float | None) -> str:
    return "-" if value is None else format_number(value)


def _point(point: tuple[int, float] | None) -> str:
    return "no points" if point is None else f"{format_number(point[1])} at {point[0]}"


def _setting(value: Any) -> str:
    text = "not recorded" if value is None else str(value)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


# ---- the picture -----------------------------------------------------------------------------------------------------


def draw_comparison(comparison: Comparison, destination: Path) -> None:
    """Draw the curves over the step as PNG, SVG or PDF: the raw points light, their medians on top. Raises `OSError`."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(10.8, 5.2), layout="constrained")
        axes: Any = figure.subplots()
        ends = []
        for at, one in enumerate(comparison.members):
            colour, curve = PALETTE[at % len(PALETTE)], one.line
            middle, raw = smooth(curve, BINS, SMOOTHED), thin(curve, BUCKETS)
            for part, look in ((raw, {"linewidth": 0.9, "alpha": 0.3 if middle.steps else 1.0}), (middle, {"linewidth": 1.8})):
                axes.plot(part.steps, part.values, color=colour, **look)
            axes.plot([], [], color=colour, linewidth=1.8, label=plain(one.name))
            ends += [value for value in curve.values if math.isfinite(value)]
        if ends:
            axes.set_ylim(*robust_range(ends))
        axes.set_xlabel("seconds of training" if comparison.by == "time" else "step")
        axes.set_ylabel(plain(comparison.channel))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
        axes.set_title(
            " · ".join(plain(one.name) for one in comparison.members)[:120], loc="left", color=INK, fontsize=11
        )
        axes.legend(frameon=False, loc="upper right")
        destination.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(destination, dpi=150, facecolor="white")
