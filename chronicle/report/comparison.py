"""Several runs side by side: state, last and best values, the loss at equal steps, the settings that differ, and one picture.

Runs are aligned by step, by the tokens that they logged, by training time (time between launches does not count), or from the
step at which they left a common ancestor; then the ancestor's own points up to where each run began are part of its curve.
Which run descends from which is told by the ids that checkpoints carry.

Only the lineage of each run counts: what a rollback left behind is in no number here. One run of each kind shows a difference
and no cause: no verdict is given; `chronicle experiment` designs a comparison that can give one.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from chronicle.errors import ChronicleError
from chronicle.paths import RunPaths
from chronicle.report.lineage_picture import INK, PALETTE, RC
from chronicle.runs import LoggedCurve, Run
from chronicle.story.launch_settings import as_value
from chronicle.story.plain import align_columns, format_number, plain
from chronicle.story.series import TOKEN_NAMES, ChannelCurve, ancestry, parent_directory, robust_range, smooth, thin
from rollback.channels import Role, role_of

POINTS = 6  # steps at which the curves are compared
SHARE = 0.05  # of the common steps, whose median is the value at a step
OUTSIDE = ("environment", "host")  # differ between any two launches and say little
SEEDS = ("seed", "random_seed", "global_seed", "manual_seed", "rng_seed")
BUCKETS, BINS, SMOOTHED = 700, 120, 120
WIDTH = 40  # letters of a setting's value
HOUR_SECONDS = 3600


class Alignment(StrEnum):
    """What the curves are aligned by."""

    STEP = "step"
    TOKENS = "tokens"
    TIME = "time"
    ANCESTOR = "ancestor"


LABELS: Mapping[Alignment, str] = {
    Alignment.STEP: "step",
    Alignment.TOKENS: "tokens",
    Alignment.TIME: "hours of training",
    Alignment.ANCESTOR: "steps after the common ancestor",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One run of the comparison. `last` and `best`: (step, value); None where the run has no such point."""

    name: str
    status: str
    launches: int
    abandoned: int
    curve: LoggedCurve
    line: ChannelCurve  # what is compared: its `steps` are the common axis (seconds where that is time)
    settings: Mapping[str, Any]
    last: tuple[int, float] | None
    best: tuple[int, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is told of some runs. `at`: (place on the axis, value of each run there, the median of the points around it)."""

    channel: str
    axis: Alignment = Alignment.STEP
    branch: str = ""  # where the runs left their common ancestor, in words
    members: tuple[Member, ...]
    at: tuple[tuple[int, tuple[float | None, ...]], ...]
    differing: tuple[tuple[str, tuple[Any, ...]], ...]  # (setting, its value in each run)
    num_equal: int

    def to_json(self) -> dict[str, Any]:
        """The form of `--json`."""
        runs = [
            {"name": one.name, "status": one.status, "launches": one.launches, "abandoned": one.abandoned,
             "points": len(one.curve), "channel": one.curve.channel, "last": one.last, "best": one.best}
            for one in self.members
        ]  # fmt: skip
        at = [{self.axis.value: _scaled(self.axis, place), "values": list(values)} for place, values in self.at]
        settings = [{"name": name, "values": list(values)} for name, values in self.differing]
        return {
            "v": 1,
            "channel": self.channel,
            "by": self.axis.value,
            "ancestor": self.branch or None,
            "runs": runs,
            "at": at,
            "settings": settings,
            "equal_settings": self.num_equal,
        }


def compare_runs(
    named: Sequence[tuple[str, Run, int | None]], channel: str, axis: Alignment = Alignment.STEP
) -> Comparison:
    """Compare runs by (label, run, launch whose settings count; None: its last).

    Raises as `Run.curve`, and `ChronicleError` where a run did not record what the axis needs.
    """
    runs = [run for _, run, _ in named]
    curves = [run.curve(channel) for run in runs]
    branch = ""
    if axis is Alignment.ANCESTOR:
        lines, branch = _since_ancestor(runs, curves)
    elif axis is Alignment.STEP:
        lines = [ChannelCurve(one.step, one.time, one.value) for one in curves]
    else:
        along = _tokens if axis is Alignment.TOKENS else _seconds
        lines = [along(run, curve) for run, curve in zip(runs, curves, strict=True)]
    members = tuple(_member(*one, curve, line) for one, curve, line in zip(named, curves, lines, strict=True))
    names = sorted({name for one in members for name in one.settings} - set(OUTSIDE))
    rows = [(name, tuple(one.settings.get(name) for one in members)) for name in names]
    differing = tuple((name, values) for name, values in rows if not _all_equal(values))
    return Comparison(
        channel=channel,
        axis=axis,
        branch=branch,
        members=members,
        at=tuple(_at_equal_places(members)),
        differing=differing,
        num_equal=len(rows) - len(differing),
    )


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
        name = ", ".join(f"{one}={plain(str(_value_in(comparison, one, first)))[:WIDTH]}" for one in telling[:3])
        values = {seed: value for seed, at in members.items() if (value := last[at]) is not None}
        arms.append(ComparedArm(name, tuple(comparison.members[at].name for at in members.values()), values))
    return tuple(arms) if len(arms) > 1 and all(len(arm.runs) > 1 for arm in arms) else ()


def _value_in(comparison: Comparison, setting: str, at: int) -> Any:
    """The value of a differing setting in the run at this place."""
    return next(values[at] for name, values in comparison.differing if name == setting)


def _member(label: str, run: Run, launch: int | None, curve: LoggedCurve, line: ChannelCurve) -> Member:
    row = run.summary()
    finite = [(value, step) for value, step in zip(curve.value, curve.step, strict=True) if math.isfinite(value)]
    extreme = max if role_of(curve.channel) is Role.REWARD else min
    best = extreme(finite) if finite else None
    return Member(
        name=label,
        status=row["status"],
        launches=row["launches"],
        abandoned=row["abandoned"],
        curve=curve,
        line=line,
        settings=run.settings(launch),
        last=(curve.step[-1], curve.value[-1]) if curve.step else None,
        best=None if best is None else (best[1], best[0]),
    )


# ---- the common axis -------------------------------------------------------------------------------------------------


def _seconds(run: Run, curve: LoggedCurve) -> ChannelCurve:
    """The curve over seconds of training: within launches, because nothing is trained between them."""
    if any(time is None for time in curve.time):
        raise ChronicleError(f"run `{run.name}` did not record the time of every step", "compare by step")
    at, places = 0.0, []
    before: tuple[int, float] | None = None
    for launch, time in zip(curve.launch, curve.time, strict=True):
        assert time is not None
        at += max(0.0, time - before[1]) if before is not None and before[0] == launch else 0.0
        before = (launch, time)
        places.append(round(at))
    return ChannelCurve(places, curve.time, curve.value)


def _tokens(run: Run, curve: LoggedCurve) -> ChannelCurve:
    """The curve over the tokens that the run logged; a counter that begins again at a resume goes on from where it was."""
    name = next((name for name in TOKEN_NAMES if name in run.channels), None)
    if name is None:
        raise ChronicleError(
            f"run `{run.name}` logged no count of tokens", f"log one as `{TOKEN_NAMES[0]}`, or compare by step"
        )
    counted = run.curve(name)
    base, newest, launch, totals = 0.0, 0.0, None, []
    for number, value in zip(counted.launch, counted.value, strict=True):
        if number != launch and launch is not None and value < newest:
            base = newest
        launch, newest = number, base + value
        totals.append(newest)
    places, kept = [], list[int]()
    for at, step in enumerate(curve.step):
        row = bisect_left(counted.step, step)
        if row < len(totals) and (counted.step[row] == step or row):
            low = row if counted.step[row] == step else row - 1
            span = counted.step[row] - counted.step[low]
            share = (step - counted.step[low]) / span if span else 0.0
            places.append(round(totals[low] + share * (totals[row] - totals[low])))
            kept.append(at)
    found = ChannelCurve(curve.step, curve.time, curve.value).at(kept)
    return replace(found, steps=places)


@dataclass(frozen=True, slots=True)
class _Link:
    """One run of a line of descent: `launch` and `step` say up to where its points count; None: it is the run itself."""

    run_id: str
    name: str
    run: Run | None
    launch: int | None = None
    step: int | None = None


def _descent(run: Run) -> list[_Link]:
    """The run, its parent, the parent's parent, …; the last one may not be here."""
    links = [_Link(run.run_id or "", run.name, run)]
    current: Run | None = run
    while current is not None and (parent := current.parent) is not None and parent.run_id:
        if any(link.run_id == parent.run_id for link in links):
            break
        directory = parent_directory(current.story, current.paths, parent)
        current = None if directory is None else Run(RunPaths(directory))
        links.append(_Link(parent.run_id, parent.run, current, parent.launch, parent.step))
    return links


def _since_ancestor(runs: Sequence[Run], curves: Sequence[LoggedCurve]) -> tuple[list[ChannelCurve], str]:
    """Each curve over the steps since the runs left their youngest common ancestor, and that place in words."""
    lines = [_descent(run) for run in runs]
    shared = {link.run_id for link in lines[0]}.intersection(*({link.run_id for link in line} for line in lines[1:])) - {""}
    found = next((link for link in lines[0] if link.run_id in shared), None)
    if found is None:
        raise ChronicleError(
            "no common ancestor of these runs is known", "`chronicle runs --tree` shows who descends from whom; compare by step"
        )
    ends = [next(link for link in line if link.run_id == found.run_id).step for line in lines]
    branch = min((end for end in ends if end is not None), default=0)
    told = []
    for line, curve in zip(lines, curves, strict=True):
        rows = list(zip(curve.step, curve.time, curve.value, strict=True))
        for link in line[1 : 1 + [one.run_id for one in line].index(found.run_id)]:
            first = rows[0][0] if rows else math.inf
            if link.run is not None:
                before = ancestry(link.run.story, link.run.paths, link.launch, link.step).get(curve.channel, ChannelCurve())
                earlier = zip(before.steps, before.times, before.values, strict=True)
                rows = [*(row for row in earlier if row[0] < first), *rows]
        rows = [row for row in rows if row[0] > branch]
        told.append(ChannelCurve([row[0] - branch for row in rows], [row[1] for row in rows], [row[2] for row in rows]))
    return told, f"run {found.name}, step {branch}"


def _scaled(axis: Alignment, place: int) -> float:
    return round(place / HOUR_SECONDS, 4) if axis is Alignment.TIME else place


def _all_equal(values: Sequence[Any]) -> bool:
    return all(as_value(value) == as_value(values[0]) for value in values[1:])


def _at_equal_places(members: Sequence[Member]) -> Iterator[tuple[int, tuple[float | None, ...]]]:
    """Places of the axis that all runs have reached, and what each had there."""
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


def tell(comparison: Comparison) -> str:
    """The comparison as tables of 80 columns and more, one column for each run."""
    members = comparison.members
    rows: list[tuple[str, ...]] = [("", *(one.name for one in members))]
    rows.append(("status", *(one.status for one in members)))
    rows.append(("launches", *(_launches(one) for one in members)))
    rows.append((f"{comparison.channel}, last", *(_point(one.last) for one in members)))
    rows.append((f"{comparison.channel}, best", *(_point(one.best) for one in members)))
    for place, values in comparison.at:
        rows.append((_place(comparison.axis, place), *(format_number(v) if v is not None else "-" for v in values)))
    said = [*align_columns(rows), ""]
    if comparison.branch:
        said.insert(0, f"aligned from where they left their common ancestor: {plain(comparison.branch)}\n")
    if comparison.differing:
        total = len(comparison.differing) + comparison.num_equal
        said.append(f"settings that differ ({len(comparison.differing)} of {total}):")
        said += align_columns([(f"  {plain(name)}", *map(_setting, values)) for name, values in comparison.differing])
    elif comparison.num_equal:
        said.append(f"all {comparison.num_equal} recorded settings are equal")
    else:
        said.append("no settings were recorded: `chronicle.config({…})` in the script records them")
    return "\n".join(said)


def _place(axis: Alignment, place: int) -> str:
    if axis is Alignment.STEP:
        return f"  at step {place}"
    if axis is Alignment.TOKENS:
        return f"  at {format_number(place)} tokens"
    if axis is Alignment.ANCESTOR:
        return f"  {place} steps after it"
    return f"  after {place / HOUR_SECONDS:.2f} h" if place >= HOUR_SECONDS // 10 else f"  after {place} s"


def _launches(one: Member) -> str:
    return f"{one.launches}, {one.abandoned} steps abandoned" if one.abandoned else str(one.launches)


def _point(point: tuple[int, float] | None) -> str:
    return "no points" if point is None else f"{format_number(point[1])} at {point[0]}"


def _setting(value: Any) -> str:
    text = "not recorded" if value is None else plain(str(value))
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
                axes.plot([_scaled(comparison.axis, place) for place in part.steps], part.values, color=colour, **look)
            axes.plot([], [], color=colour, linewidth=1.8, label=plain(one.name))
            ends += [value for value in curve.values if math.isfinite(value)]
        if ends:
            axes.set_ylim(*robust_range(ends))
        axes.set_xlabel(LABELS[comparison.axis] + (f" ({plain(comparison.branch)})" if comparison.branch else ""))
        axes.set_ylabel(plain(comparison.channel))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
        axes.set_title(
            " · ".join(plain(one.name) for one in comparison.members)[:120], loc="left", color=INK, fontsize=11
        )
        axes.legend(frameon=False, loc="upper right")
        destination.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(destination, dpi=150, facecolor="white")
