"""What a study measured, as tables and curves, and their form as CSV and Markdown. Pure.

These are the raw files of a report: `report.py` judges a study from them alone.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from experiments.gates import GateCheck
from experiments.outcomes import StudyData, excess_over, find_transients
from experiments.statistics import Values

NEAR = 60  # updates shown around a restart


@dataclass(frozen=True, slots=True)
class ReportTable:
    """Rows of text under a header. The CSV `name` holds all rows; the page shows the first `show` (None: all)."""

    name: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    show: int | None = None


ReportBlock: TypeAlias = str | ReportTable  # a paragraph or heading in Markdown, or a table


def measured_tables(data: StudyData, checks: Sequence[GateCheck]) -> list[ReportTable]:
    """Return everything that was measured, a table each."""
    controls = [(check.name, check.what, check.found) for check in checks]
    return [_outcomes(data), ReportTable("controls", ("control", "what", "found"), controls),
            _around_restarts(data), _transients(data)]


def _outcomes(data: StudyData) -> ReportTable:
    """The outcomes of every run, the primary one first."""
    names = (data.plan.study.trainer.outcome, *data.plan.study.trainer.also, "bounce")
    runs = [(arm, seed, data.runs[arm, seed]) for arm in data.arms for seed in data.seeds(arm)]
    rows = [(arm, str(seed), *(f"{run.outcome(name):.7f}" for name in names)) for arm, seed, run in runs]
    return ReportTable("outcomes", ("arm", "seed", *names), rows)


def _around_restarts(data: StudyData) -> ReportTable:
    """The mean excess loss at every update around a restart."""
    rows = []
    for arm in data.arms:
        cuts, same, twin = [], [], data.plan.twin_of(arm)
        for seed in data.seeds(arm, twin):
            run = data.runs[arm, seed]
            excess, identical = excess_over(run, data.runs[twin, seed])
            ends = (0, *run.restarts, run.num_updates)
            for before, after, end in zip(ends, run.restarts, ends[2:], strict=False):
                cuts.append(_cut(excess, after, before, end))
                same.append(identical[after : after + NEAR].all())
        if cuts:
            word = "yes" if all(same) else "no"
            mean = np.ma.masked_invalid(cuts).mean(axis=0).filled(np.nan)
            rows += [(arm, word, str(at - NEAR), f"{value:.6g}") for at, value in enumerate(mean)]
    header = ("arm", "identical_batches", "updates_after_restart", "excess_bpb")
    return ReportTable("transients", header, rows)


def _cut(curve: Values, after: int, begin: int, end: int) -> Values:
    """The curve at offsets −NEAR … NEAR of a restart, 0 the last update before it; NaN beyond the neighbouring restarts."""
    padded = np.full(len(curve) + 2 * NEAR + 1, np.nan)  # its element NEAR is the last update before a restart at 0
    padded[NEAR + 1 + begin : NEAR + 1 + end] = curve[begin:end]
    return padded[after : after + 2 * NEAR + 1]


def _transients(data: StudyData) -> ReportTable:
    """Every restart of every run."""
    rows = []
    for arm in data.arms:
        twin = data.plan.twin_of(arm)
        for seed in data.seeds(arm, twin):
            for one in find_transients(data.runs[arm, seed], data.runs[twin, seed]):
                back = "" if one.recovered_after is None else str(one.recovered_after)
                same = "yes" if one.identical_batches else "no"
                rows.append((one.run, str(one.after), "loss", same, str(one.num_updates), f"{one.area:+.4f}",
                             f"{one.peak:+.4f}", back))
    header = ("run", "after update", "channel", "identical batches", "updates", "area", "peak", "recovered after")
    return ReportTable("transient-table", header, rows)


# --- Markdown and CSV


def format_markdown(blocks: Sequence[ReportBlock]) -> str:
    """Return the report as Markdown; plots and CSV files lie beside it."""
    return "\n\n".join(block if isinstance(block, str) else _markdown(block) for block in blocks) + "\n"


def _markdown(table: ReportTable) -> str:
    if not table.rows:
        return "(none)"
    link = f"All numbers: [{table.name}.csv]({table.name}.csv)"
    shown = table.rows[: table.show]
    if not shown:
        return f"{link}."
    lines = []
    for row in (table.header, tuple("---" for _ in table.header), *shown):
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    more = f" ({len(table.rows) - len(shown)} more rows there)" if len(shown) < len(table.rows) else ""
    return "\n".join(lines) + f"\n\n{link}{more}."


def format_csv(table: ReportTable) -> str:
    """Return all rows of a table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.header, *table.rows])
    return text.getvalue()


def parse_csv(name: str, text: str, show: int | None = None) -> ReportTable:
    """Return the table of a CSV file."""
    header, *rows = csv.reader(io.StringIO(text))
    return ReportTable(name, tuple(header), list(map(tuple, rows)), show)


def column(table: ReportTable, name: str) -> Mapping[str, dict[int, float]]:
    """A column of the table of outcomes by arm and seed; cells that are not finite are left out."""
    index = table.header.index(name)
    found: dict[str, dict[int, float]] = {}
    for row in table.rows:
        if math.isfinite(float(row[index])):
            found.setdefault(row[0], {})[int(row[1])] = float(row[index])
    return found
