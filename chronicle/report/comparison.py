"""Several runs side by side: state, last and best values, the loss at equal steps, the settings that differ, and one picture.

Only the lineage of each run counts: what a rollback left behind is in no number here. One run of each kind shows a difference
and no cause: no verdict is given; `chronicle experiment` designs a comparison that can give one.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from chronicle.report.lineage_picture import INK, PALETTE, RC
from chronicle.runs import LoggedCurve, Run
from chronicle.story.launch_settings import as_value
from chronicle.story.plain import align_columns, format_number, plain
from chronicle.story.series import ChannelCurve, robust_range, smooth, thin
from rollback.channels import Role, role_of

__all__ = ["Comparison", "compare_runs", "draw_comparison"]

POINTS = 6  # steps at which the curves are compared
SHARE = 0.05  # of the common steps, whose median is the value at a step
OUTSIDE = ("environment", "host")  # differ between any two launches and say little
BUCKETS, BINS, SMOOTHED = 700, 120, 120
WIDTH = 40  # letters of a setting's value


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One run of the comparison. `last` and `best`: (step, value); None where the run has no such point."""

    name: str
    status: str
    launches: int
    abandoned: int
    curve: LoggedCurve
    settings: Mapping[str, Any]
    last: tuple[int, float] | None
    best: tuple[int, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is told of some runs. `at`: (step, value of each run, the median of the points around it; None without points)."""

    channel: str
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
        at = [{"step": step, "values": list(values)} for step, values in self.at]
        settings = [{"name": name, "values": list(values)} for name, values in self.differing]
        return {
            "v": 1,
            "channel": self.channel,
            "runs": runs,
            "at": at,
            "settings": settings,
            "equal_settings": self.num_equal,
        }


def compare_runs(named: Sequence[tuple[str, Run, int | None]], channel: str) -> Comparison:
    """Compare runs by (label, run, launch whose settings count; None: its last). Raises as `Run.curve`."""
    members = tuple(_member(label, run, launch, channel) for label, run, launch in named)
    names = sorted({name for one in members for name in one.settings} - set(OUTSIDE))
    rows = [(name, tuple(one.settings.get(name) for one in members)) for name in names]
    differing = tuple((name, values) for name, values in rows if not _all_equal(values))
    return Comparison(
        channel=channel,
        members=members,
        at=tuple(_at_equal_steps(members)),
        differing=differing,
        num_equal=len(rows) - len(differing),
    )


def _member(label: str, run: Run, launch: int | None, channel: str) -> Member:
    row, curve = run.summary(), run.curve(channel)
    finite = [(value, step) for value, step in zip(curve.value, curve.step, strict=True) if math.isfinite(value)]
    extreme = max if role_of(curve.channel) is Role.REWARD else min
    best = extreme(finite) if finite else None
    return Member(
        name=label,
        status=row["status"],
        launches=row["launches"],
        abandoned=row["abandoned"],
        curve=curve,
        settings=run.settings(launch),
        last=(curve.step[-1], curve.value[-1]) if curve.step else None,
        best=None if best is None else (best[1], best[0]),
    )


def _all_equal(values: Sequence[Any]) -> bool:
    return all(as_value(value) == as_value(values[0]) for value in values[1:])


def _at_equal_steps(members: Sequence[Member]) -> Iterator[tuple[int, tuple[float | None, ...]]]:
    """Steps that all runs have reached, and what each had there."""
    if any(not one.curve.step for one in members):
        return
    first = max(one.curve.step[0] for one in members)
    last = min(one.curve.step[-1] for one in members)
    width = max(1.0, SHARE * (last - first))
    for part in range(1, POINTS + 1) if last > first else ():
        step = first + round((last - first) * part / POINTS)
        yield step, tuple(_around(one.curve, step, width) for one in members)


def _around(curve: LoggedCurve, step: int, width: float) -> float | None:
    """The median of the finite points of the last `width` steps up to this one."""
    low, high = bisect_right(curve.step, step - width), bisect_right(curve.step, step)
    near = [value for value in curve.value[low:high] if math.isfinite(value)]
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
    for step, values in comparison.at:
        rows.append((f"  at step {step}", *(format_number(value) if value is not None else "-" for value in values)))
    said = [*align_columns(rows), ""]
    if comparison.differing:
        total = len(comparison.differing) + comparison.num_equal
        said.append(f"settings that differ ({len(comparison.differing)} of {total}):")
        said += align_columns([(f"  {plain(name)}", *map(_setting, values)) for name, values in comparison.differing])
    elif comparison.num_equal:
        said.append(f"all {comparison.num_equal} recorded settings are equal")
    else:
        said.append("no settings were recorded: `chronicle.config({…})` in the script records them")
    return "\n".join(said)


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
            colour, curve = PALETTE[at % len(PALETTE)], ChannelCurve(one.curve.step, one.curve.time, one.curve.value)
            middle, raw = smooth(curve, BINS, SMOOTHED), thin(curve, BUCKETS)
            axes.plot(raw.steps, raw.values, color=colour, linewidth=0.9, alpha=0.3 if middle.steps else 1.0)
            axes.plot(middle.steps, middle.values, color=colour, linewidth=1.8)
            axes.plot([], [], color=colour, linewidth=1.8, label=plain(one.name))
            ends += [value for value in curve.values if math.isfinite(value)]
        if ends:
            axes.set_ylim(*robust_range(ends))
        axes.set_xlabel("step")
        axes.set_ylabel(plain(comparison.channel))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
        axes.set_title(
            " · ".join(plain(one.name) for one in comparison.members)[:120], loc="left", color=INK, fontsize=11
        )
        axes.legend(frameon=False, loc="upper right")
        destination.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(destination, dpi=150, facecolor="white")
