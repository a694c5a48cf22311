"""The tables and curves of a study's report, and their form as Markdown and CSV. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from experiments.gates import Ledger
from experiments.outcomes import PROBE_GAIN, Curve, StudyData, Transient, find_transients, outcome_of
from experiments.statistics import compare_paired
from experiments.verdicts import PRIMARY, Judged, format_bpb, paired_differences

__all__ = [
    "ReportBlock",
    "ReportTable",
    "build_panel",
    "checkpoint_table",
    "contrast_table",
    "format_csv",
    "format_markdown",
    "ledger_table",
    "list_arms",
    "outcome_table",
    "secondary_table",
    "slice_ends",
    "transient_tables",
]

def contrast_table(judged: Sequence[Judged]) -> ReportTable:
    """Return every contrast with its statistics and verdict."""
    header: tuple[str, ...] = ("contrast", "difference", "n", "mean", "95 % interval", "sd", "t p", "sign-flip p", "TOST p",
                               "detectable", "verdict", "BCa interval")  # fmt: skip
    if any(one.by_ranks is not None for one in judged):
        header = (*header, "robust", "robust 95 % interval", "robust 90 % interval", "signed-rank p", "by mean", "robust says")
    return ReportTable(name="contrast-table", header=header, rows=tuple(_contrast_row(one) for one in judged))


def _contrast_row(one: Judged) -> tuple[str, ...]:
    r = one.result
    if r is None:
        return (one.name, one.formula, str(len(one.differences)), *[""] * 7, str(one.verdict), "")
    bca = f"{format_bpb(r.bca.low)} … {format_bpb(r.bca.high)}" if r.bca else ""
    return (one.name, one.formula, str(r.num_pairs), format_bpb(r.mean), f"{format_bpb(r.interval.low)} … "
                                                                         f"{format_bpb(r.interval.high)}",
            f"{r.sd:.4f}", f"{one.t_p:.4f}", f"{one.sign_flip_p:.4f}", f"{r.tost_p:.4f}", f"{r.smallest_detectable:.4f}",
            str(one.verdict), bca, *_rank_cells(one))  # fmt: skip


def _rank_cells(one: Judged) -> tuple[str, ...]:
    if one.result is None or one.by_ranks is None:
        return ()
    ranks = one.result.ranks
    intervals = (f"{format_bpb(i.low)} … {format_bpb(i.high)}" for i in (ranks.interval, ranks.inner))
    return (format_bpb(ranks.estimate), *intervals, f"{one.rank_p:.4f}", str(one.by_mean), str(one.by_ranks))


def checkpoint_table(data: StudyData, judged: Sequence[Judged]) -> ReportTable:
    """Each contrast by common checkpoint, and over orders after the mean over checkpoints: pairs depend on both."""
    starts, orders = data.plan.profile.starts, data.plan.profile.seeds
    rows = []
    for one in judged:
        at = [[d for s, d in zip(one.seeds, one.differences, strict=True) if s // orders == k] for k in range(starts)]
        means = [format_bpb(float(np.mean(values))) if values else "" for values in at]
        by_order = [[d for s, d in zip(one.seeds, one.differences, strict=True) if s % orders == k] for k in range(orders)]
        whole = [float(np.mean(values)) for values in by_order if len(values) == starts]
        cells = ("", "", "")
        if len(whole) >= 2:
            r = compare_paired(whole, margin=data.plan.study.margin_bpb, alpha=data.plan.study.alpha)
            cells = (f"{format_bpb(r.interval.low)} … {format_bpb(r.interval.high)}", f"{r.t_p:.4f}", f"{r.tost_p:.4f}")
        rows.append((one.name, *means, str(len(whole)), *cells))
    header = ("contrast", *(f"at checkpoint {k + 1}" for k in range(starts)), "orders", "95 % interval over orders", "t p",
              "TOST p")  # fmt: skip
    return ReportTable(name="by-checkpoint", header=header, rows=tuple(rows))


def transient_tables(data: StudyData) -> Iterator[ReportTable]:
    """Yield the excess loss after restarts: means by arm and channel, then every restart."""
    reference = data.plan.study.reference
    channels = ("loss", *(f"bpb/{source}" for source in data.plan.sources))
    found: dict[str, list[Transient]] = {}
    for arm in data.arms:
        for seed in data.seeds(arm, reference):
            for channel in channels:
                found.setdefault(arm, []).extend(
                    find_transients(data.runs[arm, seed], data.runs[reference, seed], channel)
                )
    rows = []
    for arm, items in found.items():
        for channel in channels:
            own = [one for one in items if one.channel == channel]
            rows += [_transient_row(arm, channel, own)] if own else []
    unit = "bpb" if data.plan.study.trainer is None else data.plan.study.unit
    header = ("arm", "channel", "restarts", "identical batches", f"area ({unit} × updates)", "95 % interval over seeds", "peak",
              "median updates to recover")  # fmt: skip
    yield ReportTable(name="transient-means", rows=tuple(rows), header=header)
    every = [one for items in found.values() for one in items]
    yield ReportTable(name="transient-table", show=0, rows=tuple(_transient_cells(one) for one in every), header=(
        "run", "after update", "channel", "identical batches", "updates", "area", "peak", "recovered after"))  # fmt: skip


def _transient_row(arm: str, channel: str, items: Sequence[Transient]) -> tuple[str, ...]:
    recovered = [one.recovered_after if one.recovered_after is not None else one.num_updates for one in items]
    same = _yes(all(one.identical_batches for one in items))
    return (arm, channel, str(len(items)), same, f"{np.mean([one.area for one in items]):+.3f}", _area_interval(items),
            f"{np.mean([one.peak for one in items]):+.3f}", f"{np.median(recovered):g}")  # fmt: skip


def _area_interval(items: Sequence[Transient]) -> str:
    """Of the mean area of a run, over runs: restarts of one run are no independent observations."""
    runs = [[one.area for one in items if one.run == run] for run in dict.fromkeys(one.run for one in items)]
    if len(runs) < 2:
        return ""
    interval = compare_paired([float(np.mean(areas)) for areas in runs], margin=1.0).interval
    return f"{interval.low:+.3f} … {interval.high:+.3f}"


def _transient_cells(one: Transient) -> tuple[str, ...]:
    same, back = (
        "yes" if one.identical_batches else "no",
        "" if one.recovered_after is None else str(one.recovered_after),
    )
    return (
        one.run,
        str(one.after),
        one.channel,
        same,
        str(one.num_updates),
        f"{one.area:+.4f}",
        f"{one.peak:+.4f}",
        back,
    )


def _secondary_names(data: StudyData) -> tuple[str, ...]:
    trainer = data.plan.study.trainer
    if trainer is not None:
        return (*trainer.also, *((*trainer.probe, PROBE_GAIN) if trainer.probe else ()), "bounce")
    slices = ("slice/1", f"slice/{len(data.plan.study.arms[0].slices)}")
    sources = tuple(f"averaged/{source}" for source in data.plan.sources)
    return (*sources, "raw/mixture", *slices, "bounce", "copy-gain", "recall-gain")


def outcome_table(data: StudyData) -> ReportTable:
    """Return the outcomes of every run, the primary one first; what no run measured has no column."""
    trainer = data.plan.study.trainer
    runs = [(arm, seed, data.runs[arm, seed]) for arm in data.arms for seed in data.seeds(arm)]
    names = [name for name in _secondary_names(data) if any(np.isfinite(outcome_of(run, name)) for _, _, run in runs)]
    rows = [(arm, str(seed), *(f"{outcome_of(run, name):.7f}" for name in (PRIMARY, *names))) for arm, seed, run in runs]
    header = ("arm", "seed", PRIMARY if trainer is None else trainer.outcome, *names)
    return ReportTable(name="outcomes", header=header, rows=tuple(rows), show=16)


def secondary_table(data: StudyData) -> ReportTable:
    """Differences on the other outcomes, without verdicts: they were not registered as primary."""
    study = data.plan.study
    names = _secondary_names(data)
    rows = []
    for contrast in study.contrasts:
        for name in names:
            values = [
                v for v in paired_differences(data, contrast.plus, contrast.minus, name).values() if np.isfinite(v)
            ]
            if len(values) >= 2:
                r = compare_paired(values, margin=study.margin_bpb, alpha=study.alpha)
                interval = f"{format_bpb(r.interval.low)} … {format_bpb(r.interval.high)}"
                rows.append((contrast.name, name, str(r.num_pairs), format_bpb(r.mean), interval))
    header = ("contrast", "outcome (not primary, no verdict)", "n", "mean", "95 % interval")
    return ReportTable(name="secondary", header=header, rows=tuple(rows), show=24)


def ledger_table(ledgers: Sequence[Ledger]) -> ReportTable:
    """Return the sample counts of every run."""
    rows = tuple(
        (one.run, *(f"{n:,}" for n in (one.drawn, one.repeats, one.unread)), _yes(one.as_planned), " ".join(one.guard))
        for one in ledgers
    )
    header = ("run", "drawn", "drawn again", "of the slices never read", "digests as planned", "guard, by launch")
    return ReportTable(name="ledger-table", header=header, rows=rows, show=16)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


# --- Curves and outcomes for pages that know no studies

VERSION = 1
LOSS_EVERY = 5  # updates averaged into one point of a training curve
DIGITS = 6


def build_panel(data: StudyData, judged: Sequence[Judged]) -> dict[str, Any]:
    """`panel.json`: plain finite numbers (None where there is none), the same for the same runs."""
    study = data.plan.study
    return {
        "v": VERSION, "title": study.title, "unit": study.unit, "outcome": study.primary, "margin": study.margin_bpb,
        "x": "updates after the common checkpoint", "marks": slice_ends(data), "curves": list(_curves(data)),
        "outcomes": [{"arm": arm, "seed": seed, "value": _plain(outcome_of(data.runs[arm, seed], PRIMARY))}
                     for arm in data.arms for seed in data.seeds(arm)],
        "contrasts": [_contrast(one) for one in judged],
    }  # fmt: skip


def list_arms(data: StudyData) -> list[dict[str, Any]]:
    """Rows of `id`, `name`, `restarts`, `data`: the table of arms that every page can draw."""
    return [{"id": arm, "name": data.plan.study.arm(arm).says, "restarts": len(data.of_arm(arm)[0].restarts),
             "data": " ".join(str(one) for one in data.plan.study.arm(arm).slices)} for arm in data.arms]  # fmt: skip


def slice_ends(data: StudyData) -> list[int]:
    """Updates after which a slice ends, but for the last."""
    return [number * data.plan.profile.slice_updates for number in range(1, len(data.plan.study.arms[0].slices))]


def _curves(data: StudyData) -> Iterator[dict[str, Any]]:
    reference = data.plan.study.reference
    for arm in data.arms:
        runs = data.of_arm(arm)
        yield _band("loss", arm, [_thinned(run.loss) for run in runs])
        yield _band("eval", arm, [run.channel("eval/mixture") for run in runs])
        seeds = data.seeds(arm, reference)
        if arm != reference and seeds:
            base = [data.runs[reference, seed].channel("eval/mixture") for seed in seeds]
            own = [data.runs[arm, seed].channel("eval/mixture") for seed in seeds]
            yield _band("difference", arm, [a - b for a, b in zip(own, base, strict=True)])


def _band(channel: str, arm: str, curves: Sequence[Curve]) -> dict[str, Any]:
    """Mean over seeds with its 95 % t interval, at the updates where every seed has a value."""
    stacked = np.stack(curves)
    where = np.flatnonzero(np.isfinite(stacked).all(axis=0))
    mean = stacked[:, where].mean(axis=0)
    ends: list[tuple[float | None, float | None]] = [(None, None)] * len(where)
    if len(curves) > 1:
        found = [compare_paired(stacked[:, i].tolist(), margin=1.0).interval for i in where]
        ends = [(_plain(one.low), _plain(one.high)) for one in found]
    return {"channel": channel, "arm": arm, "x": (where + 1).tolist(), "mean": [_plain(v) for v in mean],
            "low": [low for low, _ in ends], "high": [high for _, high in ends]}  # fmt: skip


def _thinned(curve: Curve) -> Curve:
    """The mean of each `LOSS_EVERY` updates at the last of them, else NaN."""
    thin = np.full(len(curve), np.nan)
    for last in range(LOSS_EVERY - 1, len(curve), LOSS_EVERY):
        thin[last] = curve[last - LOSS_EVERY + 1 : last + 1].mean()
    return thin


def _contrast(one: Judged) -> dict[str, Any]:
    r = one.result
    numbers = (None, None, None) if r is None else (r.mean, r.interval.low, r.interval.high)
    return {"name": one.name, "formula": one.formula, "question": one.question, "family": one.family, "n": len(one.seeds),
            **dict(zip(("mean", "low", "high"), (_plain(v) for v in numbers), strict=True)), "verdict": str(one.verdict),
            "differences": [_plain(value) for value in one.differences]}  # fmt: skip


def _plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


# --- Markdown and CSV


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """Rows of text under a header. The CSV `name` holds all rows; the page shows the first `show` (None: all)."""

    name: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    show: int | None = None


ReportBlock: TypeAlias = str | ReportTable  # a paragraph or heading in Markdown, or a table


def format_markdown(blocks: Sequence[ReportBlock]) -> str:
    """Return the report as Markdown; plots and CSV files lie beside it."""
    return "\n\n".join(block if isinstance(block, str) else _markdown(block) for block in blocks) + "\n"


def _markdown(table: ReportTable) -> str:
    if not table.rows:
        return "(none)"
    link = f"All numbers: [{table.name}.csv]({table.name}.csv)"
    if table.show == 0:
        return f"{link}."
    shown = table.rows[: table.show]
    lines = [table.header, tuple("---" for _ in table.header), *shown]
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)
    more = f" ({len(table.rows) - len(shown)} more rows there)" if len(shown) < len(table.rows) else ""
    return f"{text}\n\n{link}{more}."


def format_csv(table: ReportTable) -> str:
    """Return all rows of a table as CSV."""
    return "\n".join(",".join(_quote(cell) for cell in row) for row in (table.header, *table.rows)) + "\n"


def _quote(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"' if any(sign in cell for sign in ',"\n') else cell
