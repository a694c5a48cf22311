"""The tables of a study's report: contrasts, transients, outcomes, the ledger of samples. Pure over what was read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from experiments.document import Table
from experiments.gates import Ledger
from experiments.outcomes import StudyData, outcome_of
from experiments.statistics import compare_paired
from experiments.transients import Transient, find_transients
from experiments.verdicts import Judged, paired_differences
from experiments.words import format_bpb

__all__ = ["contrast_table", "ledger_table", "outcome_table", "secondary_table", "transient_tables"]


def contrast_table(judged: Sequence[Judged]) -> Table:
    header = ("contrast", "difference", "n", "mean", "95 % interval", "sd", "t p", "sign-flip p", "TOST p", "detectable",
              "verdict", "BCa interval")  # fmt: skip
    return Table(name="contrast-table", header=header, rows=tuple(_contrast_row(one) for one in judged))


def _contrast_row(one: Judged) -> tuple[str, ...]:
    r = one.result
    if r is None:
        return (one.name, one.formula, str(len(one.differences)), *[""] * 7, str(one.verdict), "")
    bca = f"{format_bpb(r.bca.low)} … {format_bpb(r.bca.high)}" if r.bca else ""
    return (one.name, one.formula, str(r.num_pairs), format_bpb(r.mean), f"{format_bpb(r.interval.low)} … "
                                                                         f"{format_bpb(r.interval.high)}",
            f"{r.sd:.4f}", f"{one.t_p:.4f}", f"{one.sign_flip_p:.4f}", f"{r.tost_p:.4f}", f"{r.smallest_detectable:.4f}",
            str(one.verdict), bca)  # fmt: skip


def transient_tables(data: StudyData) -> Iterator[Table]:
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
    header = ("arm", "channel", "restarts", "identical batches", "area (bpb × updates)", "95 % interval over seeds", "peak",
              "median updates to recover")  # fmt: skip
    yield Table(name="transient-means", rows=tuple(rows), header=header)
    every = [one for items in found.values() for one in items]
    yield Table(name="transient-table", show=0, rows=tuple(_transient_cells(one) for one in every), header=(
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
    slices = ("slice/1", f"slice/{len(data.plan.study.arms[0].slices)}")
    sources = tuple(f"averaged/{source}" for source in data.plan.sources)
    return (*sources, "raw/mixture", *slices, "bounce", "copy-gain", "recall-gain")


def outcome_table(data: StudyData) -> Table:
    names = ("averaged/mixture", *_secondary_names(data))
    rows = [(arm, str(seed), *(f"{outcome_of(data.runs[arm, seed], name):.5f}" for name in names))
            for arm in data.arms for seed in data.seeds(arm)]  # fmt: skip
    return Table(name="outcomes", header=("arm", "seed", *names), rows=tuple(rows), show=16)


def secondary_table(data: StudyData) -> Table:
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
    return Table(name="secondary", header=header, rows=tuple(rows), show=24)


def ledger_table(ledgers: Sequence[Ledger]) -> Table:
    rows = tuple(
        (one.run, *(f"{n:,}" for n in (one.drawn, one.repeats, one.unread)), _yes(one.as_planned), " ".join(one.guard))
        for one in ledgers
    )
    header = ("run", "drawn", "drawn again", "of the slices never read", "digests as planned", "guard, by launch")
    return Table(name="ledger-table", header=header, rows=rows, show=16)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
