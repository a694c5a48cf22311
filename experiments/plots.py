"""The seven plots of a study, each with its numbers as CSV. Colours are fixed per arm."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from chronicle.report.page_data import contrast_reach
from experiments.gates import Ledger, find_treatment
from experiments.outcomes import Curve, RunData, StudyData, excess_over
from experiments.statistics import compare_paired
from experiments.tables import ReportTable, format_csv, slice_ends
from experiments.verdicts import EffectVerdict, Judged

__all__ = [
    "PLOTS",
    "UPDATES",
    "as_text",
    "colour_of",
    "compared_arms",
    "draw_contrasts",
    "draw_differences",
    "draw_ledger",
    "draw_losses",
    "draw_plots",
    "draw_ratios",
    "draw_same",
    "draw_transients",
]

PLOTS = {
    "losses": "Training loss (mean of 25 updates): thin lines are seeds, thick ones their mean; dashed: ends of "
    "slices, where the restarted arms restart. Arms with one seed only are left out: a mean of others lies elsewhere.",
    "differences": "The held-out outcome during the run, minus the reference at the same seed: thin lines are seeds, the "
    "thick one their mean, the band its 95 % paired t interval.",
    "transients": "Excess loss around the restarts, mean over restarts and seeds. Left: on identical batches, each update. "
    "Right: another order, over the reference's local mean, mean of 5 updates.",
    "contrasts": "Contrasts on the primary outcome with 95 % intervals, dots are seeds; shaded: the registered margin of "
    "equivalence.",
    "ratios": "Share of the first source in the batches (mean of 5 updates, first seed).",
    "ledger": "Samples drawn more than once, and samples of the slices never read, per run of the first seed.",
    "same-until-treated": "The A/A check: absolute difference of the loss to the reference at the same seed; it must be 0 "
    "until the treatment.",
}


def draw_plots(
    data: StudyData, judged: Sequence[Judged], ledgers: Sequence[Ledger], directory: Path
) -> tuple[str, ...]:
    """Write `<name>.png` and `<name>.csv` of every plot; the same data give the same bytes with the same matplotlib."""
    drawers: dict[str, Callable[[Any], ReportTable]] = {
        "losses": lambda figure: draw_losses(figure, data),
        "differences": lambda figure: draw_differences(figure, data),
        "transients": lambda figure: draw_transients(figure, data),
        "contrasts": lambda figure: draw_contrasts(figure, data, judged),
        "ratios": lambda figure: draw_ratios(figure, data),
        "ledger": lambda figure: draw_ledger(figure, ledgers),
        "same-until-treated": lambda figure: draw_same(figure, data),
    }
    if data.plan.study.trainer is not None:  # what it reads is not known
        del drawers["ratios"], drawers["ledger"]
    for name, draw in drawers.items():
        _write(name, draw, directory)
    return tuple(drawers)


def _write(name: str, draw: Callable[[Any], ReportTable], directory: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # means over updates that no arm logged
        table = draw(figure)
    for axes in figure.axes:
        axes.grid(alpha=0.25, lw=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    _save(figure, directory / f"{name}.png")
    (directory / f"{name}.csv").write_text(format_csv(table), encoding="utf-8")


def _save(figure: Any, path: Path) -> None:
    """A PNG of 256 colours: a third of the bytes, and reports are kept in repositories."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    colours = Image.open(drawn).convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    colours.save(path, optimize=True)


# --- Colours and words

COLOURS = ("#7f7f7f", "#000000", "#009e73", "#d55e00", "#cc79a7", "#0072b2", "#e69f00", "#56b4e9", "#8c564b", "#66a61e",
           "#7b3294", "#b2182b", "#2166ac", "#a6761d")  # fmt: skip
UPDATES = "updates after the common checkpoint"


def compared_arms(data: StudyData) -> Iterator[str]:
    """Arms but for the exact restart, which is the reference."""
    yield from (arm for arm in data.arms if arm not in data.plan.study.gate[1:])


def colour_of(data: StudyData, arm: str) -> str:
    """Return the colour of an arm, the same in every plot."""
    names = [one.name for one in data.plan.study.arms]
    return COLOURS[names.index(arm) % len(COLOURS)]


def as_text(value: float) -> str:
    """Return a number with six digits, for the CSV of a plot."""
    return f"{value:.6g}"


# --- Plots over updates

LOSS_WIDTH = 25


def draw_losses(figure: Any, data: StudyData) -> ReportTable:
    """One panel a source."""
    rows = []
    most = max(len(data.seeds(arm)) for arm in data.arms)
    channels = {source: f"bpb/{source}" for source in data.plan.sources} or {"loss": "loss"}
    panels = figure.subplots(1, len(channels), squeeze=False)[0]
    for axes, (source, channel) in zip(panels, channels.items(), strict=True):
        for arm in compared_arms(data):
            curves = np.stack([_smooth(run.channel(channel), LOSS_WIDTH) for run in data.of_arm(arm)])
            mean, updates = np.nanmean(curves, axis=0), np.arange(1, curves.shape[1] + 1)
            rows += [(arm, source, str(update), as_text(value)) for update, value in zip(updates, mean, strict=True)][4::5]
            if len(curves) > 1 or most == 1:
                for curve in curves:
                    axes.plot(updates, curve, color=colour_of(data, arm), lw=0.4, alpha=0.2)
                axes.plot(updates, mean, color=colour_of(data, arm), lw=1.5, label=arm)
        _mark_slices(axes, data)
        axes.set_xlabel(UPDATES, fontsize=8)
        axes.set_ylabel("bits per byte" if data.plan.sources else "as logged", fontsize=8)
        axes.set_title(source, fontsize=9)
    _legend_below(figure, panels[0])
    return ReportTable(name="losses", header=("arm", "source", "update", "bpb_mean_of_seeds"), rows=tuple(rows))


def draw_differences(figure: Any, data: StudyData) -> ReportTable:
    """One panel an arm, one scale."""
    rows, reference = [], data.plan.study.reference
    arms = [arm for arm in compared_arms(data) if arm != reference and data.seeds(arm, reference)]
    columns = max(1, min(4, math.ceil(len(arms) / 2))) if len(arms) > 3 else max(1, len(arms))
    figure.set_figheight(max(4.4, 2.0 * math.ceil(len(arms) / columns)))
    grid = figure.subplots(math.ceil(len(arms) / columns) or 1, columns, squeeze=False, sharex=True, sharey=True)
    for axes, arm in zip(grid.ravel(), arms, strict=False):
        seeds, colour = data.seeds(arm, reference), colour_of(data, arm)
        curves = np.stack(
            [data.runs[arm, s].channel("eval/mixture") - data.runs[reference, s].channel("eval/mixture") for s in seeds]
        )
        where = np.flatnonzero(np.isfinite(curves).all(axis=0))
        mean = curves[:, where].mean(axis=0)
        for curve in curves:
            axes.plot(where + 1, curve[where], color=colour, lw=0.4, alpha=0.5)
        axes.plot(where + 1, mean, color=colour, marker=".", ms=3, lw=1.5)
        low, high = mean, mean
        if len(seeds) > 1:
            intervals = [compare_paired(curves[:, i].tolist(), margin=1.0).interval for i in where]
            low, high = np.array([i.low for i in intervals]), np.array([i.high for i in intervals])
            axes.fill_between(where + 1, low, high, color=colour, alpha=0.2, lw=0)
        rows += [(arm, str(u + 1), *map(as_text, band)) for u, *band in zip(where, mean, low, high, strict=True)]
        axes.set_title(f"{arm} − {reference} (n = {len(seeds)})", fontsize=9)
    for axes in grid.ravel()[len(arms) :]:
        axes.set_visible(False)
    for axes in grid.ravel()[: len(arms)]:
        _mark_slices(axes, data)
        axes.axhline(0, color="black", lw=0.8)
    ends = [float(value) for *_, low, high in rows for value in (low, high)]
    bottom, top = (min(0.0, np.quantile(ends, 0.03)), max(0.0, np.quantile(ends, 0.97))) if ends else (0.0, 0.0)
    room = 0.3 * max(-bottom, top)
    grid[0, 0].set_ylim(*(bottom - room, top + room) if room else (-1, 1))
    figure.supxlabel(UPDATES, fontsize=8)
    figure.supylabel(f"held-out {data.plan.study.unit}, minus {reference}", fontsize=8)
    return ReportTable(name="differences", header=("arm", "update", "mean", "low", "high"), rows=tuple(rows))


def draw_ratios(figure: Any, data: StudyData) -> ReportTable:
    """Widest line first, so that arms that share a line are all seen."""
    axes, source, rows = figure.subplots(), next(iter(data.plan.sources)), []
    for number, arm in enumerate(data.arms):
        run = data.of_arm(arm)[0]
        curve = _smooth(run.channel(f"ratio/{source}"), 5)
        width = 1.2 + 6 * (1 - number / len(data.arms))
        axes.plot(np.arange(1, len(curve) + 1), curve, color=colour_of(data, arm), lw=width, label=arm)
        rows += [(arm, str(update), as_text(value)) for update, value in enumerate(run.channel(f"ratio/{source}"), 1)]
    _mark_slices(axes, data)
    axes.set_xlabel(UPDATES, fontsize=8)
    axes.set_ylabel(f"share of `{source}` in the batches", fontsize=8)
    axes.set_ylim(0, 1)
    _legend_below(figure, axes)
    return ReportTable(name="ratios", header=("arm", "update", "share"), rows=tuple(rows))


def draw_same(figure: Any, data: StudyData) -> ReportTable:
    """One strip an arm: an equal loss lies on the line named 0."""
    rows, reference, floor = [], data.plan.study.reference, 1e-7
    arms = [arm for arm in data.arms if arm != reference and data.seeds(arm, reference)]
    columns = 1 if len(arms) <= 3 else 2 if len(arms) <= 6 else 3
    grid = figure.subplots(math.ceil(len(arms) / columns) or 1, columns, squeeze=False, sharex=True, sharey=True)
    for axes, arm in zip(grid.ravel(), arms, strict=False):
        seed = data.seeds(arm, reference)[0]
        run = data.runs[arm, seed]
        apart = np.abs(run.loss - data.runs[reference, seed].loss)
        treated = find_treatment(data.plan, data.plan.study.arm(arm), run.run.legs).first
        axes.plot(np.arange(1, len(apart) + 1), np.maximum(apart, floor), color=colour_of(data, arm), lw=0.9)
        if treated:
            axes.axvline(treated, color="black", ls="--", lw=0.8)
        word = "never treated" if treated is None else "treated at once" if treated == 0 else f"treated after {treated}"
        axes.set_title(f"{arm}: {word}", fontsize=8)
        axes.set_yscale("log")
        axes.set_yticks([floor, 1e-5, 1e-3, 1e-1], ["0", "$10^{-5}$", "$10^{-3}$", "0.1"])
        axes.set_ylim(floor / 3, 10)
        rows += [(arm, str(update), repr(float(value))) for update, value in enumerate(apart, 1)]
    for axes in grid.ravel()[len(arms) :]:
        axes.set_visible(False)
    figure.supxlabel(UPDATES, fontsize=8)
    figure.supylabel(f"|loss difference|, {data.plan.study.unit}", fontsize=8)
    return ReportTable(name="same-until-treated", header=("arm", "update", "abs_difference_bpb"), rows=tuple(rows))


def _mark_slices(axes: Any, data: StudyData) -> None:
    for update in slice_ends(data):
        axes.axvline(update, color="black", ls="--", lw=0.5, alpha=0.5)


def _smooth(curve: Curve, width: int) -> Curve:
    """Trailing mean over `width` updates, over what is there at the beginning; NaN while that is less than a third."""
    filled = np.nan_to_num(curve)
    total = np.cumsum(filled)
    counts = np.cumsum(np.isfinite(curve).astype(float))
    total[width:], counts[width:] = total[width:] - total[:-width], counts[width:] - counts[:-width]
    smooth: Curve = np.where(counts * 3 >= width, total / np.maximum(counts, 1), np.nan)
    return smooth


def _legend_below(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(8, max(1, len(labels))), fontsize=8, frameon=False)


# --- Plots of effects

NEAR = 60
VERDICT_COLOURS = {EffectVerdict.DIFFERENCE: "#d55e00", EffectVerdict.EQUIVALENT: "#009e73"}


def draw_transients(figure: Any, data: StudyData) -> ReportTable:
    """Identical batches left, other orders right: their scales and their noise differ by a factor of ten."""
    rows, reference = [], data.plan.study.reference
    offsets = np.arange(-NEAR, NEAR + 1)
    left, right = figure.subplots(1, 2)
    for arm in compared_arms(data):
        cuts, same = [], True
        for seed in data.seeds(arm, reference):
            found, identical = _cuts(data.runs[arm, seed], data.runs[reference, seed])
            cuts += found
            same &= identical
        if cuts:
            mean = np.nanmean(np.stack(cuts), axis=0)
            axes, shown = (left, mean) if same else (right, _centred(mean, 5))
            axes.plot(offsets, shown, color=colour_of(data, arm), lw=1.2, label=f"{arm} ({len(cuts)} restarts)")
            rows += [(arm, "yes" if same else "no", str(o), as_text(v)) for o, v in zip(offsets, mean, strict=True)]
    for axes, title in ((left, "identical batches"), (right, "another order (mean of 5 updates)")):
        axes.axvline(0, color="black", ls="--", lw=0.8)
        axes.axhline(0, color="black", lw=0.8)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("updates after a restart", fontsize=8)
        axes.set_ylabel(f"excess loss, {data.plan.study.unit}", fontsize=8)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, frameon=False)
        else:
            axes.text(0.5, 0.55, "no such arm was run", ha="center", transform=axes.transAxes, fontsize=8, color="#777777")
    header = ("arm", "identical_batches", "updates_after_restart", "excess_bpb")
    return ReportTable(name="transients", header=header, rows=tuple(rows))


def _cuts(run: RunData, base: RunData) -> tuple[list[Curve], bool]:
    """The excess around each restart of a run, and whether all batches after them are the reference's."""
    excess, identical = excess_over(run, base, "loss")
    cuts, same = [], True
    for index, after in enumerate(run.restarts):
        bounds = (run.restarts[index - 1] if index else 0, [*run.restarts, run.num_updates][index + 1])
        cuts.append(_around(excess, after, bounds))
        same &= bool(identical[after : after + NEAR].all())
    return cuts, same


def _around(curve: Curve, after: int, bounds: tuple[int, int]) -> Curve:
    """The curve at offsets −NEAR … NEAR of a restart, 0 the last update before it; NaN beyond the neighbouring restarts."""
    found = np.full(2 * NEAR + 1, np.nan)
    for position, offset in enumerate(range(-NEAR, NEAR + 1)):
        index = after + offset - 1
        if bounds[0] <= index < min(bounds[1], len(curve)):
            found[position] = curve[index]
    return found


def draw_contrasts(figure: Any, data: StudyData, judged: Sequence[Judged]) -> ReportTable:
    """Draw each contrast with its interval and its seeds, and the margin of equivalence; return the numbers."""
    margin, rows = data.plan.study.margin_bpb, []
    figure.set_size_inches(9, 1.2 + 0.42 * max(3, len(judged)))
    axes = figure.subplots()
    axes.axvspan(-margin, margin, color="#009e73", alpha=0.12, lw=0)
    axes.axvline(0, color="black", lw=0.8)
    labels = []
    for row, one in enumerate(reversed(judged)):
        labels.append(f"{one.name}{' (main)' if one.family == 'main' else ''}\n{one.formula} (n = {len(one.differences)})")
        colour = VERDICT_COLOURS.get(one.verdict, "#555555")
        axes.scatter(one.differences, [row + 0.22] * len(one.differences), s=7, color="grey", alpha=0.6, lw=0)
        mean, low, high = (float("nan"),) * 3
        if one.result is not None:
            mean, low, high = one.result.mean, one.result.interval.low, one.result.interval.high
            axes.plot([low, high], [row, row], color=colour, lw=2)
            axes.plot([mean], [row], "o", color=colour, ms=5)
        axes.text(1.01, row, str(one.verdict), transform=axes.get_yaxis_transform(), va="center", fontsize=8, color=colour)
        rows.append((one.name, one.formula, str(len(one.differences)), *map(as_text, (mean, low, high)), str(one.verdict)))
    shown = [one.result.interval for one in judged if one.result is not None]
    reach = contrast_reach([(interval.low, interval.high) for interval in shown], margin)
    for row, one in enumerate(reversed(judged)):
        if one.result is not None and max(-one.result.interval.low, one.result.interval.high) > reach:
            said = f"{one.result.mean:+.2g} ({one.result.interval.low:+.2g} … {one.result.interval.high:+.2g}), beyond the axis"
            axes.text(0.99, row - 0.32, said, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=7)
    axes.set_xlim(-reach, reach)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(-0.6, len(labels) - 0.4)
    axes.set_xlabel(f"difference, {data.plan.study.unit} (below 0: the first arm is better)", fontsize=8)
    header = ("contrast", "formula", "seeds", "mean", "low", "high", "verdict")
    return ReportTable(name="contrasts", header=header, rows=tuple(reversed(rows)))


def draw_ledger(figure: Any, ledgers: Sequence[Ledger]) -> ReportTable:
    """Draw repeated and unread samples per run of the first seed; return the numbers of all runs."""
    axes, first = figure.subplots(), [ledger for ledger in ledgers if ledger.run.endswith("-s0")]
    places = np.arange(len(first))
    again = axes.bar(places - 0.2, [one.repeats for one in first], width=0.4, label="drawn again", color="#d55e00")
    left_out = [one.unread for one in first]
    unread = axes.bar(places + 0.2, left_out, width=0.4, label="of the slices, never read", color="#0072b2")
    for bars in (again, unread):
        axes.bar_label(bars, fontsize=7)
    axes.set_xticks(places, [ledger.run for ledger in first])
    axes.set_ylabel("samples", fontsize=8)
    axes.margins(y=0.15)
    axes.legend(fontsize=8, frameon=False)
    rows = tuple((one.run, str(one.drawn), str(one.repeats), str(one.unread), "yes" if one.as_planned else "no",
                  " ".join(one.guard)) for one in ledgers)  # fmt: skip
    header = ("run", "drawn", "repeats", "unread", "digests_as_planned", "guard_by_launch")
    return ReportTable(name="ledger", header=header, rows=rows)


def _centred(curve: Curve, width: int) -> Curve:
    """Centred mean of the finite values; never across the restart in the middle."""
    half, middle = width // 2, len(curve) // 2
    found = np.full(len(curve), np.nan)
    for i in range(len(curve)):
        first, last = max(0, i - half), min(len(curve), i + half + 1)
        first, last = (first, min(last, middle + 1)) if i <= middle else (max(first, middle + 1), last)
        part = curve[first:last]
        if np.isfinite(curve[i]):
            found[i] = np.nanmean(part)
    return found
