"""The two plots of a study, drawn from the tables of its report. Colours are fixed per arm."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.design import StudyPlan
from experiments.tables import ReportTable
from experiments.verdicts import EffectVerdict, Judged, count_units

PLOTS = {
    "transients": "Excess loss around the restarts, mean over restarts and seeds. Left: on identical batches. Right: another "
    "order, over the reference's local mean.",
    "contrasts": "Contrasts on the primary outcome: 95 % intervals (thin) and 90 % intervals (thick) over independent units, "
    "dots are pairs; shaded: the registered margin of equivalence. Logarithmic beyond twice the margin of the outcome.",
}
COLOURS = ("#7f7f7f", "#000000", "#009e73", "#d55e00", "#cc79a7", "#0072b2", "#e69f00", "#56b4e9", "#8c564b", "#66a61e",
           "#7b3294", "#b2182b", "#2166ac", "#a6761d")
VERDICT_COLOURS = {EffectVerdict.DIFFERENCE: "#d55e00", EffectVerdict.EQUIVALENT: "#009e73"}


def draw_plots(plan: StudyPlan, transients: ReportTable, judged: Sequence[Judged], directory: Path) -> None:
    """Write a PNG of every plot; the same tables give the same bytes with the same matplotlib."""
    colours = {arm.name: COLOURS[number % len(COLOURS)] for number, arm in enumerate(plan.study.arms)}
    _draw_transients(directory, transients, colours, plan.study.unit)
    _draw_contrasts(directory, judged, plan.study.margin_bpb, plan.study.unit)


def _draw_transients(directory: Path, table: ReportTable, colours: Mapping[str, str], unit: str) -> None:
    """A line an arm; a panel for identical batches, and one for another order."""
    figure = _figure()
    kinds = sorted({row[1] for row in table.rows}, reverse=True)
    words = {"yes": "identical batches", "no": "another order"}
    for kind, axes in zip(kinds, figure.subplots(1, max(1, len(kinds)), squeeze=False)[0], strict=False):
        shown = [row for row in table.rows if row[1] == kind]
        for arm in dict.fromkeys(row[0] for row in shown):
            points = np.array([row[2:] for row in shown if row[0] == arm], dtype=float)
            axes.plot(*points.T, color=colours[arm], lw=1.3, label=arm)
        axes.axvline(0, color="black", ls="--", lw=0.5, alpha=0.5)
        axes.axhline(0.0, color="black", lw=0.8)
        axes.set_title(words[kind], fontsize=9)
        axes.set_xlabel("updates after a restart", fontsize=8)
        axes.set_ylabel(f"excess loss, {unit}", fontsize=8)
        axes.legend(fontsize=7, frameon=False, ncols=2)
    _save(figure, directory / "transients.png")


def _draw_contrasts(directory: Path, judged: Sequence[Judged], margin: float, unit: str) -> None:
    """Linear up to twice the margin, logarithmic beyond: an arm that nearly diverged does not hide the others."""
    figure = _figure(height=1.2 + 0.42 * max(3, len(judged)))
    axes = figure.subplots()
    axes.axvline(0, color="black", lw=0.8)
    labels = []
    for row, one in enumerate(reversed(judged)):
        main = " (main)" if one.asked.family == "main" else ""
        labels.append(f"{one.name}{main}\n{one.asked.formula}, {count_units(one).partition(' (')[0]}")
        colour = VERDICT_COLOURS.get(one.verdict, "#555555")
        axes.barh(row, 2 * one.margin, left=-one.margin, height=1, color="#009e73", alpha=0.12)
        axes.scatter(list(one.differences.values()), [row + 0.22] * len(one.differences), s=7, color="grey", alpha=0.6, lw=0)
        axes.text(1.01, row, str(one.verdict), transform=axes.get_yaxis_transform(), va="center", fontsize=8, color=colour)
        r = one.result
        if r is None:
            continue
        axes.plot([r.low, r.high], [row, row], color=colour, lw=1)
        axes.plot([r.inner_low, r.inner_high], [row, row], color=colour, lw=3)
        axes.plot([r.mean], [row], "o", color=colour, ms=5)
    axes.set_xscale("symlog", linthresh=2 * margin)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(-0.6, len(labels) - 0.4)
    axes.set_xlabel(f"difference, {unit} (below 0: the first arm is better)", fontsize=8)
    _save(figure, directory / "contrasts.png")


def _figure(height: float = 4.4) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(9, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    """A PNG of 256 colours: a third of the bytes, and reports are kept in repositories."""
    from PIL import Image

    for axes in figure.axes:
        axes.grid(alpha=0.25, lw=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    colours = Image.open(drawn).convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE)
    colours.save(path, optimize=True)
