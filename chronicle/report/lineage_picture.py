"""The picture of a run: LR on top, loss by launch below it, and the tree of launches at the bottom.

Drawing rules (journal_and_interface §6.2): y is clipped to robust quantiles with marks for points outside, lines end where a
launch ends, a launch has one colour in all panels, abandoned parts are grey. Uses matplotlib's `Figure` without pyplot, so it
needs no display and changes no global state. Lines of one look are one artist, which keeps 10^4 launches fast.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicle.story.assemble import LaunchStory, Story
from chronicle.story.learning import would_have_resumed_at
from chronicle.story.plain import format_factor, plain
from chronicle.story.series import ChannelCurve, LaunchSeries, ParentSeries, shown_range, smooth, thin
from rollback.channels import Role, find_channel, role_of

# Of launches: neither red (an incident) nor violet (hardware) nor grey (abandoned). Neighbours, and the first four among them,
# are 16 or more apart (CIE76) for normal, protan, deutan and tritan sight (Machado 2009), and 10 or more from the red
PALETTE = ("#2f6fb0", "#d9822b", "#3c9a5f", "#72591d", "#1c5fc4", "#5c99d6", "#6aa117", "#1d7225", "#4ea6bc", "#a98560")
GREY, LIGHT, INK, ALARM = "#b3b8bf", "#e4e7eb", "#2b2f36", "#c62f2f"
BEFORE = "#7c828b"  # the parent run's curve: grey, and darker than what was abandoned
BUCKETS = 900
SMOOTHED_POINTS, SMOOTH_BINS = 120, 120
TICKS = 20  # checkpoints shown per launch; more would look like a dashed line
SPARSE_POINTS = 200  # of all channels of one launch
LABELS = 24  # more launches are drawn without labels and ticks, with fewer points, and one mark for neighbouring events
BUTT = {"solid_capstyle": "butt"}
CROSS = {"linestyle": "none", "marker": "x"}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panels:
    figure: Any
    lr: Any
    loss: Any
    tree: Any


class _Strokes:
    """Lines collected by panel and look; each group is drawn as one artist with gaps."""

    def __init__(self) -> None:
        self.found: dict[tuple[Any, ...], tuple[Any, list[float], list[float]]] = {}

    def add(self, axes: Any, xs: Sequence[float], ys: Sequence[float], **look: Any) -> None:
        """Add a line."""
        _, at, values = self.found.setdefault((id(axes), *look.items()), (axes, [], []))
        gap = [math.nan] if at else []
        at += [*gap, *xs]
        values += [*gap, *ys]

    def draw(self) -> None:
        """Draw all lines, groups in the order in which they were added."""
        for (_, *look), (axes, xs, ys) in self.found.items():
            axes.plot(xs, ys, **dict(look))


def draw_lineage(
    story: Story, series: Sequence[LaunchSeries], destination: Path, parent: ParentSeries | None = None
) -> None:
    """Write the PNG (about 1600 × 1150 pixels); raises ImportError if matplotlib is not installed."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(RC):
        panels = _panels(Figure, min(max(len(story.launches), 2), 40), has_lr=_name(series, Role.LR) is not None)
        _curves(panels, story, series)
        before = {} if parent is None else parent.channels
        for axes, role in ((panels.loss, Role.LOSS), (panels.lr, Role.LR)):
            name = _name(series, role)
            curve = before.get(name or "", ChannelCurve())
            thinned = thin(curve, BUCKETS)
            axes.plot(thinned.steps, thinned.values, color=BEFORE, linewidth=1.3, zorder=2.5)
            _scale(axes, story, series, name, curve.values)
        _tree(panels, story)
        _marks(panels, story)
        _words(panels, story, parent)
        destination.parent.mkdir(parents=True, exist_ok=True)
        panels.figure.savefig(destination, dpi=150, metadata={"Software": None}, facecolor="white")


def _panels(figure_class: Any, rows: int, *, has_lr: bool) -> _Panels:
    lr_height = 1.15 if has_lr else 0.02  # without one only the legend stands there
    height = 4.05 + lr_height + 0.17 * rows
    figure = figure_class(figsize=(10.8, height), layout="constrained")
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


def _colour(launch: LaunchStory) -> str:
    return PALETTE[(launch.number - 1) % len(PALETTE)]


def _is_sparse(series: Sequence[LaunchSeries]) -> bool:
    """Whether there are so few points that each is drawn as a dot."""
    return max((sum(len(c.steps) for c in s.channels.values()) for s in series), default=0) < SPARSE_POINTS


def _curves(panels: _Panels, story: Story, series: Sequence[LaunchSeries]) -> None:
    strokes, count = _Strokes(), len(story.launches)
    dots = count <= LABELS and _is_sparse(series)
    buckets = BUCKETS if count <= LABELS else max(2, BUCKETS * LABELS // count)
    for one in series:
        launch = story.launch(one.launch)
        for axes, role in ((panels.lr, Role.LR), (panels.loss, Role.LOSS)):
            name = find_channel(one.channels, role)
            curve = one.channels.get(name) if name else None
            if curve is not None and launch is not None:
                _curve(strokes, axes, launch, curve, buckets, dots=dots)
    strokes.draw()


def _curve(strokes: _Strokes, axes: Any, launch: LaunchStory, curve: ChannelCurve, buckets: int, *, dots: bool) -> None:
    """The kept part in the launch's colour, the abandoned part behind it in grey; a single point is a dot."""
    for kept, part in zip((True, False), curve.parted(launch), strict=True):
        if not part.steps:
            continue
        thinned = thin(part, buckets)
        style = {"color": _colour(launch) if kept else GREY, "linewidth": 1.3 if kept else 1.0, "zorder": 3 if kept else 2}
        marker = {"marker": "o", "markersize": 2.6} if dots or len(part.steps) == 1 else {}
        drift = smooth(part, SMOOTH_BINS, SMOOTHED_POINTS) if kept and axes.get_ylabel() == "loss" else ChannelCurve()
        look = {"solid_joinstyle": "round", "alpha": 0.35 if drift.steps else 1, **style, **marker}
        strokes.add(axes, thinned.steps, thinned.values, **look)
        if drift.steps:
            strokes.add(axes, drift.steps, drift.values, color=_colour(launch), linewidth=1.7, zorder=4)


def _name(series: Sequence[LaunchSeries], role: Role) -> str | None:
    return find_channel((name for launch in series for name in launch.channels), role)


def _scale(
    axes: Any, story: Story, series: Sequence[LaunchSeries], name: str | None, before: Sequence[float]
) -> None:
    """The y range: that of the kept points with room for abandoned ones near it; points outside are marked at the border."""
    if name is None:
        return
    kept, gone = [*before], list[float]()
    for launch in series:
        told, curve = story.launch(launch.launch), launch.channels.get(name, ChannelCurve())
        mine, left = (curve, ChannelCurve()) if told is None else curve.parted(told)
        kept += mine.values
        gone += left.values
    if role_of(name) is Role.LR:
        top = max((v for v in (*kept, *gone) if math.isfinite(v)), default=1.0)
        axes.set_ylim(0, top * 1.25 or 1.0)
        return
    low, high = shown_range(kept, gone)
    axes.set_ylim(low, high)
    width, beyond = _hundredth(story), []
    for launch in series:
        curve = launch.channels.get(name, ChannelCurve())
        beyond += _sparse([s for s, v in zip(curve.steps, curve.values, strict=True) if not v <= high], width)
    look = {"linestyle": "none", "marker": "^", "markersize": 4, "color": GREY, "zorder": 4}
    axes.plot(beyond, [0.988] * len(beyond), transform=axes.get_xaxis_transform(), **look)


def _hundredth(story: Story) -> int:
    return max(1, max((x.span.last_step or 0 for x in story.launches), default=1) // 100)


def _sparse(steps: Sequence[int], width: int) -> list[int]:
    """At most one step per `width`."""
    out: list[int] = []
    for step in steps:
        if not out or abs(step - out[-1]) >= width:
            out.append(step)
    return out


def _told_apart(steps: Sequence[int], story: Story) -> list[int]:
    """The steps to mark; with more than `LABELS` launches at most one per hundredth of the axis."""
    return list(steps) if len(story.launches) <= LABELS else _sparse(sorted(set(steps)), _hundredth(story))


def _tree(panels: _Panels, story: Story) -> None:
    """One row per launch: kept part thick and coloured, abandoned part grey, a line from where it branched off."""
    axes, rows, strokes = panels.tree, {launch.number: i for i, launch in enumerate(story.launches)}, _Strokes()
    wide = len(story.launches) <= LABELS
    for launch in story.launches:
        start, last = launch.span.start_step, launch.span.last_step
        if start is None or not launch.span.has_steps:
            _refused(strokes, axes, launch, would_have_resumed_at(story, launch), rows[launch.number], wide=wide)
            continue
        row, limit = rows[launch.number], launch.span.abandoned_after
        last = start if last is None else max(last, start)
        kept_to = last if limit is None else max(limit, start)
        if launch.span.parent in rows:
            strokes.add(axes, [start, start], [rows[launch.span.parent], row], color=GREY, linewidth=1.0, zorder=1)
        if last > kept_to:
            strokes.add(axes, [kept_to, last], [row, row], color=GREY, linewidth=2.4, zorder=2, **BUTT)
            if wide:
                strokes.add(axes, [last], [row], markersize=5, color=GREY, markeredgewidth=1.4, zorder=2, **CROSS)
        if kept_to > start:
            strokes.add(axes, [start, kept_to], [row, row], color=_colour(launch), linewidth=4.2, zorder=3, **BUTT)
        saved = [c.step for c in launch.checkpoints] if wide and len(launch.checkpoints) <= TICKS else []
        strokes.add(axes, saved, [row] * len(saved), linestyle="none", marker="|", markersize=6, color="white", zorder=4)
        if wide:
            label = f"{launch.number}  {format_factor(launch.lr.factor)}" if launch.lr else str(launch.number)
            label += "  inferred" if story.lineage.is_guess(launch.span) else ""
            axes.annotate(label, (last, row), xytext=(8, 0), textcoords="offset points", va="center", fontsize=8)
    strokes.draw()
    axes.set_ylim(len(rows) - 0.4, -0.7)


def _refused(strokes: _Strokes, axes: Any, launch: LaunchStory, step: int | None, row: int, *, wide: bool) -> None:
    """A launch without steps: a cross where it would have resumed."""
    if step is None:
        return
    strokes.add(axes, [step], [row], markersize=6, color=ALARM, markeredgewidth=1.6, zorder=3, **CROSS)
    if wide:
        words = f"{launch.number}  refused" if launch.verdict == "refused" else f"{launch.number}  no step"
        axes.annotate(words, (step, row), xytext=(8, 0), textcoords="offset points", va="center", fontsize=8)


def _marks(panels: _Panels, story: Story) -> None:
    targets = [mark.to_step for mark in story.lineage.rollbacks]
    for step in _told_apart(targets, story):
        for axes in (panels.lr, panels.loss):
            axes.axvline(step, color="#8a5a00", linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.65, zorder=1)
    for step in _told_apart(_restarts(story), story):
        for axes in (panels.lr, panels.loss):
            axes.axvline(step, color="#7c828b", linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
    for step in _told_apart([m.onset for m in story.matters if m.onset is not None], story):
        _pin(panels.loss, step, "v", ALARM)
    for step in _told_apart([entry.step or 0 for entry in story.hardware], story):
        _pin(panels.loss, step, "D", "#7a3fb0")


def _restarts(story: Story) -> list[int]:
    """Where launches resumed without a rollback."""
    targets = {mark.to_step for mark in story.lineage.rollbacks}
    starts = (launch.span.start_step for launch in story.launches)
    return [start for start in starts if start and start not in targets]


def _pin(axes: Any, step: int, marker: str, colour: str) -> None:
    transform = axes.get_xaxis_transform()
    axes.plot([step], [1.015], marker=marker, markersize=6, color=colour, transform=transform, clip_on=False, zorder=6)
    axes.axvline(step, color=colour, linewidth=0.7, alpha=0.35, zorder=1)


def _words(panels: _Panels, story: Story, parent: ParentSeries | None) -> None:
    from matplotlib.lines import Line2D

    head = story.headline
    title = f"{plain(story.run)}: step {head.step}"
    if head.loss is not None:
        title += f", loss {head.loss:.4g}"
    panels.figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    handles = [Line2D([], [], color=GREY, linewidth=2, label="abandoned")]
    if parent is not None and parent.channels:
        handles.insert(0, Line2D([], [], color=BEFORE, linewidth=2, label=f"run {parent.name}"))
    remarks = [*([parent.words] if parent else []), *([story.lineage.doubt] if story.lineage.doubt else [])]
    if remarks:
        place = {"transform": panels.loss.transAxes, "va": "bottom", "fontsize": 8, "color": "#555b64", "zorder": 7}
        panels.loss.text(0.006, 0.05, "\n".join(remarks), **place)
    if story.lineage.rollbacks:
        handles.append(Line2D([], [], color="#8a5a00", linestyle=(0, (4, 3)), linewidth=1, label="rollback to here"))
    if _restarts(story):
        handles.append(Line2D([], [], color="#7c828b", linestyle=(0, (1, 2)), linewidth=1, label="restart"))
    if story.matters:
        handles.append(Line2D([], [], color=ALARM, marker="v", linestyle="none", label="incident"))
    if story.hardware:
        handles.append(Line2D([], [], color="#7a3fb0", marker="D", linestyle="none", label="hardware"))
    panels.lr.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1.01), ncols=6, frameon=False, fontsize=8)
    _factors(panels, story)


def _factors(panels: _Panels, story: Story) -> None:
    """The cumulative LR factor, written into the LR panel where it changes."""
    shown: float | None = math.nan
    if len(story.launches) > LABELS or not panels.lr.axison:
        return
    for launch in story.launches:
        if launch.lr is None or launch.span.start_step is None or launch.lr.factor == shown:
            continue
        shown = launch.lr.factor
        position = (launch.span.start_step, 0.97)
        panels.lr.annotate(
            format_factor(shown), position, xycoords=panels.lr.get_xaxis_transform(), xytext=(4, 0),
            textcoords="offset points", va="top", fontsize=8, fontweight="bold", color=_colour(launch),
        )  # fmt: skip
