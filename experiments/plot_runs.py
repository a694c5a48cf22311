"""Pictures of the runs of a study, update by update: losses, differences, shares of the data, the A/A check."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from experiments.document import Table
from experiments.gates import find_treatment
from experiments.outcomes import Curve, StudyData
from experiments.panel import slice_ends
from experiments.plot_style import UPDATES, as_text, colour_of, compared
from experiments.statistics import compare_paired
from experiments.transients import to_bpb

__all__ = ["draw_differences", "draw_losses", "draw_ratios", "draw_same"]

LOSS_WIDTH = 25


def draw_losses(figure: Any, data: StudyData) -> Table:
    """One panel a source."""
    rows = []
    most = max(len(data.seeds(arm)) for arm in data.arms)
    panels = figure.subplots(1, len(data.plan.sources), squeeze=False)[0]
    for axes, source in zip(panels, data.plan.sources, strict=True):
        for arm in compared(data):
            curves = np.stack([_smooth(run.channel(f"bpb/{source}"), LOSS_WIDTH) for run in data.of_arm(arm)])
            mean, updates = np.nanmean(curves, axis=0), np.arange(1, curves.shape[1] + 1)
            rows += [(arm, source, str(update), as_text(value)) for update, value in zip(updates, mean, strict=True)][4::5]
            if len(curves) > 1 or most == 1:
                for curve in curves:
                    axes.plot(updates, curve, color=colour_of(data, arm), lw=0.4, alpha=0.2)
                axes.plot(updates, mean, color=colour_of(data, arm), lw=1.5, label=arm)
        _mark_slices(axes, data)
        axes.set_xlabel(UPDATES, fontsize=8)
        axes.set_ylabel("bits per byte", fontsize=8)
        axes.set_title(source, fontsize=9)
    _legend_below(figure, panels[0])
    return Table(name="losses", header=("arm", "source", "update", "bpb_mean_of_seeds"), rows=tuple(rows))


def draw_differences(figure: Any, data: StudyData) -> Table:
    """One panel an arm, one scale."""
    rows, reference = [], data.plan.study.reference
    arms = [arm for arm in compared(data) if arm != reference and data.seeds(arm, reference)]
    columns = max(1, math.ceil(len(arms) / 2)) if len(arms) > 3 else max(1, len(arms))
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
    widest = [abs(float(value)) for *_, low, high in rows for value in (low, high)]
    top = float(np.quantile(widest, 0.97)) if widest else 0.0
    grid[0, 0].set_ylim(*(-1.3 * top, 1.3 * top) if top else (-1, 1))
    figure.supxlabel(UPDATES, fontsize=8)
    figure.supylabel(f"held-out bits per byte, minus {reference}", fontsize=8)
    return Table(name="differences", header=("arm", "update", "mean", "low", "high"), rows=tuple(rows))


def draw_ratios(figure: Any, data: StudyData) -> Table:
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
    return Table(name="ratios", header=("arm", "update", "share"), rows=tuple(rows))


def draw_same(figure: Any, data: StudyData) -> Table:
    """One strip an arm: an equal loss lies on the line named 0."""
    rows, reference, floor = [], data.plan.study.reference, 1e-7
    arms = [arm for arm in data.arms if arm != reference and data.seeds(arm, reference)]
    columns = 1 if len(arms) <= 3 else 2 if len(arms) <= 6 else 3
    grid = figure.subplots(math.ceil(len(arms) / columns) or 1, columns, squeeze=False, sharex=True, sharey=True)
    for axes, arm in zip(grid.ravel(), arms, strict=False):
        seed = data.seeds(arm, reference)[0]
        run = data.runs[arm, seed]
        apart = np.abs(to_bpb(run.channel("loss")) - to_bpb(data.runs[reference, seed].channel("loss")))
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
    figure.supylabel("|loss difference|, bits per byte", fontsize=8)
    return Table(name="same-until-treated", header=("arm", "update", "abs_difference_bpb"), rows=tuple(rows))


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
    figure.legend(handles, labels, loc="outside lower center", ncols=min(10, max(1, len(labels))), fontsize=8, frameon=False)


