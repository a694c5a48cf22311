"""Pictures of what a restart did: transients around it, contrasts of the outcome, what was drawn twice or never."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from chronicle.report.study_panels import contrast_reach
from experiments.document import Table
from experiments.gates import Ledger
from experiments.outcomes import Curve, RunData, StudyData
from experiments.plot_style import as_text, colour_of, compared
from experiments.transients import excess_over
from experiments.verdicts import Judged, Verdict

__all__ = ["draw_contrasts", "draw_ledger", "draw_transients"]

NEAR = 60
VERDICT_COLOURS = {Verdict.DIFFERENCE: "#d55e00", Verdict.EQUIVALENT: "#009e73"}


def draw_transients(figure: Any, data: StudyData) -> Table:
    """Identical batches left, other orders right: their scales and their noise differ by a factor of ten."""
    rows, reference = [], data.plan.study.reference
    offsets = np.arange(-NEAR, NEAR + 1)
    left, right = figure.subplots(1, 2)
    for arm in compared(data):
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
        axes.set_ylabel("excess loss, bits per byte", fontsize=8)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, frameon=False)
        else:
            axes.text(0.5, 0.55, "no such arm was run", ha="center", transform=axes.transAxes, fontsize=8, color="#777777")
    header = ("arm", "identical_batches", "updates_after_restart", "excess_bpb")
    return Table(name="transients", header=header, rows=tuple(rows))


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


def draw_contrasts(figure: Any, data: StudyData, judged: Sequence[Judged]) -> Table:
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
    axes.set_xlabel("difference, bits per byte (below 0: the first arm is better)", fontsize=8)
    header = ("contrast", "formula", "seeds", "mean", "low", "high", "verdict")
    return Table(name="contrasts", header=header, rows=tuple(reversed(rows)))


def draw_ledger(figure: Any, ledgers: Sequence[Ledger]) -> Table:
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
    return Table(name="ledger", header=header, rows=rows)


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
