"""The picture of a run: LR on top, loss by launch below it, and the tree of launches at the bottom.

It draws what the page draws, from the same data (`chronicle.report.page_data`). Drawing rules (journal_and_interface §6.2): y
is clipped to robust quantiles with marks for points outside, lines end where a launch ends, a launch has one colour in all
panels, abandoned parts are grey. Uses matplotlib's `Figure` without pyplot, so it needs no display and changes no global
state. Lines of one look are one artist, which keeps 10^4 launches fast.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chronicle.report.page_data import build_page_data
from chronicle.story.assemble import Story
from chronicle.story.series import LaunchSeries, ParentSeries
from rollback.channels import Role, find_channel

GREY, LIGHT, INK, ALARM = "#b3b8bf", "#e4e7eb", "#2b2f36", "#c62f2f"
BEFORE = "#7c828b"  # the parent run's curve: grey, and darker than what was abandoned
TICKS = 20  # checkpoints shown per launch; more would look like a dashed line
SPARSE_POINTS = 30  # of a launch: where none has more, each is a dot
LABELS = 24  # more launches are drawn without labels and ticks, and with one mark for neighbouring events
MARKS = (  # label, rows of the page's data, field of the step, marker above the loss, colour, dashes of the line
    ("rollback to here", "rollbacks", "to", "", "#8a5a00", (0, (4, 3))),
    ("restart", "restarts", "step", "", "#7c828b", (0, (1, 2))),
    ("incident", "incidents", "onset", "v", ALARM, "solid"),
    ("hardware", "hardware", "step", "D", "#7a3fb0", "solid"),
)
BUTT = {"solid_capstyle": "butt"}
DOTS = {"marker": "o", "markersize": 2.6}
CROSS = {"linestyle": "none", "marker": "x"}
BESIDE = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.edgecolor": "#9aa0a8",
    "axes.linewidth": 0.8,
    "axes.labelcolor": INK,
    "xtick.color": "#555b64",
    "ytick.color": "#555b64",
    "text.color": INK,
}
Data = Mapping[str, Any]  # as of `build_page_data`


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panels:
    figure: Any
    lr: Any
    loss: Any
    tree: Any


class _Strokes:
    """Lines collected by look; each group is drawn as one artist with gaps."""

    def __init__(self, axes: Any) -> None:
        self._axes = axes
        self._found: dict[tuple[Any, ...], tuple[list[float], list[float | None]]] = {}

    def add(self, xs: Sequence[float], ys: Sequence[float | None], **look: Any) -> None:
        """Add a line."""
        at, values = self._found.setdefault(tuple(look.items()), ([], []))
        gap = [math.nan] if at else []
        at += [*gap, *xs]
        values += [*gap, *ys]

    def draw(self) -> None:
        """Draw all lines, groups in the order in which they were added."""
        for look, (xs, ys) in self._found.items():
            self._axes.plot(xs, ys, **dict(look))


def draw_lineage(
    story: Story, series: Sequence[LaunchSeries], destination: Path, parent: ParentSeries | None = None
) -> None:
    """Write the PNG (about 1600 × 1150 pixels); raises ImportError if matplotlib is not installed."""
    import matplotlib

    data = build_page_data(story, _of_panels(series), {}, parent)
    saved = {launch.number: [one.step for one in launch.checkpoints] for launch in story.launches}
    with matplotlib.rc_context(RC):
        panels = _panels(min(max(len(story.launches), 2), 40), has_lr=data["lr"] is not None)
        for axes, role in ((panels.loss, "loss"), (panels.lr, "lr")):
            if data[role] is not None:
                _curves(axes, data, data[role])
        _tree(panels.tree, data, saved)
        _marks(panels, data)
        _words(panels, data, story)
        destination.parent.mkdir(parents=True, exist_ok=True)
        panels.figure.savefig(destination, dpi=150, metadata={"Software": None}, facecolor="white")


def _of_panels(series: Sequence[LaunchSeries]) -> list[LaunchSeries]:
    """Loss and LR of each launch, under one name in all of them; the other channels are not drawn."""
    logged = {name: None for one in series for name in one.channels}
    names = [(role, name) for role in (Role.LOSS, Role.LR) if (name := find_channel(logged, role)) is not None]
    shown = []
    for one in series:
        own = {name: find_channel(one.channels, role) for role, name in names}
        shown.append(replace(one, channels={name: one.channels[mine] for name, mine in own.items() if mine is not None}))
    return shown


def _panels(rows: int, *, has_lr: bool) -> _Panels:
    from matplotlib.figure import Figure

    lr_height = 1.15 if has_lr else 0.02  # without one only the legend stands there
    height = 4.05 + lr_height + 0.17 * rows
    figure: Any = Figure(figsize=(10.8, height), layout="constrained")
    lr, loss, tree = figure.subplots(3, 1, sharex=True, height_ratios=[lr_height, 3.0, 0.55 + 0.17 * rows])
    for axes in (lr, loss, tree):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="both" if axes is not tree else "x", color=LIGHT, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.margins(x=0.015)
    lr.set_ylabel("learning rate")
    if not has_lr:
        lr.set_axis_off()
    loss.set_ylabel("loss")
    tree.set_xlabel("step (optimizer steps completed)")
    tree.set_yticks([])
    tree.spines["left"].set_visible(False)
    return _Panels(figure=figure, lr=lr, loss=loss, tree=tree)


def _curves(axes: Any, data: Data, name: str) -> None:
    """Of each launch the kept part in its colour, the abandoned part behind it in grey; a single point is a dot."""
    rows, strokes = data["curves"][name], _Strokes(axes)
    colours = {row["number"]: row["colour"] for row in data["launches"]}
    parts = [row[part] for row in rows for part in ("kept", "gone") if part in row]
    sparse = len(data["launches"]) <= LABELS and all(len(part["s"]) <= SPARSE_POINTS for part in parts)
    for row in rows:
        has_drift = "drift" in row and name == data["loss"]
        kept = {"color": colours[row["launch"]], "linewidth": 1.3, "zorder": 3, "alpha": 0.35 if has_drift else 1}
        for part, look in (("kept", kept), ("gone", {"color": GREY, "linewidth": 1.0, "zorder": 2})):
            if part in row:
                curve = row[part]
                dots = DOTS if sparse or len(curve["s"]) == 1 else {}
                strokes.add(curve["s"], curve["v"], solid_joinstyle="round", **look, **dots)
        if has_drift:
            strokes.add(row["drift"]["s"], row["drift"]["v"], color=kept["color"], linewidth=1.7, zorder=4)
    strokes.draw()
    if data["parent"] and name in data["parent"]["curves"]:
        before = data["parent"]["curves"][name]
        axes.plot(before["s"], before["v"], color=BEFORE, linewidth=1.3, zorder=2.5)
    low, high = data["ranges"][name]
    axes.set_ylim(low, high * 1.1 if name == data["lr"] else high)  # room for the factors
    points = (point for part in parts for point in zip(part["s"], part["v"], strict=True))
    beyond = _sparse(sorted(step for step, value in points if value is None or value > high), _hundredth(data))
    look = {"linestyle": "none", "marker": "^", "markersize": 4, "color": GREY, "zorder": 4}
    axes.plot(beyond, [0.988] * len(beyond), transform=axes.get_xaxis_transform(), **look)


def _hundredth(data: Data) -> int:
    last: int = max(row["last"] or 0 for row in data["launches"])
    return max(1, last // 100)


def _sparse(steps: Sequence[int], width: int) -> list[int]:
    """At most one step per `width`."""
    out: list[int] = []
    for step in steps:
        if not out or step - out[-1] >= width:
            out.append(step)
    return out


def _tree(axes: Any, data: Data, saved: Mapping[int, Sequence[int]]) -> None:
    """One row per launch: kept part thick and coloured, abandoned part grey, a line from where it branched off."""
    strokes = _Strokes(axes)
    places = {row["number"]: place for place, row in enumerate(data["launches"])}
    wide = len(places) <= LABELS
    for place, row in enumerate(data["launches"]):
        start, last = row["start"], row["last"]
        if start is None or last is None or last <= start:  # a cross where it would have resumed
            if row["stood"] is not None:
                strokes.add([row["stood"]], [place], markersize=6, color=ALARM, markeredgewidth=1.6, zorder=3, **CROSS)
                words = "refused" if row["guard"] == "refused" else "no step"
                if wide:
                    axes.annotate(f"{row['number']}  {words}", (row["stood"], place), **BESIDE)
            continue
        kept_to = max(row["keptTo"], start)
        if row["parent"] in places:
            strokes.add([start, start], [places[row["parent"]], place], color=GREY, linewidth=1.0, zorder=1)
        if last > kept_to:
            strokes.add([kept_to, last], [place, place], color=GREY, linewidth=2.4, zorder=2, **BUTT)
            if wide:
                strokes.add([last], [place], markersize=5, color=GREY, markeredgewidth=1.4, zorder=2, **CROSS)
        if kept_to > start:
            strokes.add([start, kept_to], [place, place], color=row["colour"], linewidth=4.2, zorder=3, **BUTT)
        if wide:
            steps = saved[row["number"]] if len(saved[row["number"]]) <= TICKS else []
            strokes.add(steps, [place] * len(steps), linestyle="none", marker="|", markersize=6, color="white", zorder=4)
            label = f"{row['number']}  {row['lr']}".rstrip() + ("  inferred" if row["inferred"] else "")
            axes.annotate(label, (last, place), **BESIDE)
    strokes.draw()
    axes.set_ylim(len(places) - 0.4, -0.7)


def _marks(panels: _Panels, data: Data) -> None:
    """The rows of `MARKS`; with more than `LABELS` launches one mark per hundredth of the axis."""
    width = 1 if len(data["launches"]) <= LABELS else _hundredth(data)
    transform = panels.loss.get_xaxis_transform()
    for _, rows, field, marker, colour, dashes in MARKS:
        steps = _sparse(sorted({row[field] for row in data[rows] if row[field] is not None}), width)
        for step in steps:
            for axes in (panels.loss,) if marker else (panels.loss, panels.lr):
                axes.axvline(step, color=colour, linewidth=0.8, linestyle=dashes, alpha=0.35 if marker else 0.8, zorder=1)
        look = {"marker": marker, "linestyle": "none", "markersize": 6, "color": colour, "clip_on": False, "zorder": 6}
        if marker and steps:  # an empty line that is not clipped would take room below the panel
            panels.loss.plot(steps, [1.015] * len(steps), transform=transform, **look)


def _words(panels: _Panels, data: Data, story: Story) -> None:
    from matplotlib.lines import Line2D

    loss, parent = story.headline.loss, data["parent"]
    title = f"{data['run']}: step {data['head']['step']}" + ("" if loss is None else f", loss {loss:.4g}")
    panels.figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    remarks = [story.lineage.doubt] if story.lineage.doubt else []
    handles = [Line2D([], [], color=GREY, linewidth=2, label="abandoned")]
    if parent is not None:
        remarks.insert(0, parent["words"])
        if parent["curves"]:
            handles.insert(0, Line2D([], [], color=BEFORE, linewidth=2, label=f"run {parent['name']}"))
    for label, rows, _, marker, colour, dashes in MARKS:
        if data[rows]:
            style = "none" if marker else dashes
            handles.append(Line2D([], [], color=colour, linestyle=style, marker=marker, linewidth=1, label=label))
    place = {"transform": panels.loss.transAxes, "va": "bottom", "fontsize": 8, "color": "#555b64", "zorder": 7}
    if remarks:
        panels.loss.text(0.006, 0.05, "\n".join(remarks), **place)
    panels.lr.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1.01), ncols=6, frameon=False, fontsize=8)
    _factors(panels.lr, data)


def _factors(axes: Any, data: Data) -> None:
    """The cumulative LR factor, written into the LR panel where it changes."""
    shown = ""
    if len(data["launches"]) > LABELS or data["lr"] is None:
        return
    for row in data["launches"]:
        if row["start"] is None or row["lr"] in ("", shown):
            continue
        shown, look = row["lr"], {**BESIDE, "xytext": (4, 0), "va": "top", "fontweight": "bold", "color": row["colour"]}
        axes.annotate(shown, (row["start"], 0.97), xycoords=axes.get_xaxis_transform(), **look)
