"""The four plots of a study, drawn from the tables of its report. Colours are fixed per arm."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.design import StudyPlan
from experiments.tables import ReportTable, slice_ends
from experiments.verdicts import EffectVerdict, Judged, count_units

PLOTS = {
    "losses": "Training loss, mean of seeds and of 25 updates; dashed: ends of slices, where the restarted arms restart.",
    "differences": "The held-out outcome during the run, minus the reference at the same seed, mean of seeds.",
    "transients": "Excess loss around the restarts, mean over restarts and seeds. Left: on identical batches. Right: another "
    "order, over the reference's local mean.",
    "contrasts": "Contrasts on the primary outcome: 95 % intervals (thin) and 90 % intervals (thick) over independent units, "
    "dots are pairs; shaded: the registered margin of equivalence.",
}
COLOURS = ("#7f7f7f", "#000000", "#009e73", "#d55e00", "#cc79a7", "#0072b2", "#e69f00", "#56b4e9", "#8c564b", "#66a61e",
           "#7b3294", "#b2182b", "#2166ac", "#a6761d")
VERDICT_COLOURS = {EffectVerdict.DIFFERENCE: "#d55e00", EffectVerdict.EQUIVALENT: "#009e73"}
UPDATES = "updates after the common checkpoint"


def draw_plots(plan: StudyPlan, tables: Mapping[str, ReportTable], judged: Sequence[Judged], directory: Path) -> None:
    """Write a PNG of every plot; the same tables give the same bytes with the same matplotlib."""
    colours = {arm.name: COLOURS[number % len(COLOURS)] for number, arm in enumerate(plan.study.arms)}
    unit = plan.study.unit
    _draw_lines(directory, "losses", tables["losses"], colours, panels=1, marks=slice_ends(plan), labels=(UPDATES, unit))
    _draw_lines(directory, "differences", tables["differences"], colours, marks=slice_ends(plan),
                labels=(UPDATES, f"held-out {unit}, minus {plan.study.reference}"), level=0.0)
    _draw_lines(directory, "transients", tables["transients"], colours, panels=1, marks=[0], level=0.0,
                labels=("updates after a restart", f"excess loss, {unit}"))
    _draw_contrasts(directory, judged, plan.study.margin_bpb, unit)


def _draw_lines(
    directory: Path, name: str, table: ReportTable, colours: Mapping[str, str], *, marks: Sequence[int],
    labels: tuple[str, str], panels: int | None = None, level: float | None = None,
) -> None:
    """A line an arm from the last two columns; `panels` is the column whose values have a panel each."""
    figure = _figure()
    titles = sorted({row[panels] for row in table.rows}, reverse=True) if panels is not None else [""]
    axes_of = dict(zip(titles, figure.subplots(1, max(1, len(titles)), squeeze=False)[0], strict=False))
    lines: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    for row in table.rows:
        xs, ys = lines.setdefault((row[panels] if panels is not None else "", row[0]), ([], []))
        xs.append(float(row[-2]))
        ys.append(float(row[-1]))
    for (title, arm), (xs, ys) in lines.items():
        axes_of[title].plot(xs, ys, color=colours.get(arm, "black"), lw=1.3, label=arm)
    words = {"yes": "identical batches", "no": "another order"}
    for title, axes in axes_of.items():
        for mark in marks:
            axes.axvline(mark, color="black", ls="--", lw=0.5, alpha=0.5)
        if level is not None:
            axes.axhline(level, color="black", lw=0.8)
        axes.set_title(words.get(title, title), fontsize=9)
        axes.set_xlabel(labels[0], fontsize=8)
        axes.set_ylabel(labels[1], fontsize=8)
        axes.legend(fontsize=7, frameon=False, ncols=2)
    _save(figure, directory / f"{name}.png")


def contrast_reach(intervals: Iterable[tuple[float, float]], margin: float) -> float:
    """Half the length of the axis of contrasts. An arm that nearly diverged is cut, so that the others can be read."""
    ends = [max(abs(low), abs(high)) for low, high in intervals]
    return max([2 * margin, *(1.15 * end for end in ends if end <= 5 * margin)])


def _draw_contrasts(directory: Path, judged: Sequence[Judged], margin: float, unit: str) -> None:
    figure = _figure(height=1.2 + 0.42 * max(3, len(judged)))
    axes = figure.subplots()
    axes.axvspan(-margin, margin, color="#009e73", alpha=0.12, lw=0)
    axes.axvline(0, color="black", lw=0.8)
    reach = contrast_reach([(one.result.low, one.result.high) for one in judged if one.result is not None], margin)
    labels = []
    for row, one in enumerate(reversed(judged)):
        main = " (main)" if one.asked.family == "main" else ""
        labels.append(f"{one.name}{main}\n{one.asked.formula}, {count_units(one).partition(' (')[0]}")
        colour = VERDICT_COLOURS.get(one.verdict, "#555555")
        place = axes.get_yaxis_transform()
        axes.scatter(list(one.differences.values()), [row + 0.22] * len(one.differences), s=7, color="grey", alpha=0.6, lw=0)
        axes.text(1.01, row, str(one.verdict), transform=place, va="center", fontsize=8, color=colour)
        r = one.result
        if r is None:
            continue
        axes.plot([r.low, r.high], [row, row], color=colour, lw=1)
        axes.plot([r.inner_low, r.inner_high], [row, row], color=colour, lw=3)
        axes.plot([r.mean], [row], "o", color=colour, ms=5)
        if max(-r.low, r.high) > reach:
            said = f"{r.mean:+.2g} ({r.low:+.2g} … {r.high:+.2g}), beyond the axis"
            axes.text(0.99, row - 0.32, said, transform=place, ha="right", va="center", fontsize=7)
    axes.set_xlim(-reach, reach)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(-0.6, len(labels) - 0.4)
    axes.set_xlabel(f"difference, {unit} (below 0: the first arm is better)", fontsize=8)
    _save(figure, directory / "contrasts.png")


def _figure(height: float = 4.4) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> None:
    """A PNG of 256 colours: a third of the bytes, and reports are kept in repositories."""
    from PIL import Image

    for axes in figure.axes:
        axes.grid(alpha=0.25, lw=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    colours = Image.open(drawn).convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    colours.save(path, optimize=True)
