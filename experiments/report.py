"""The report of a study: refused where its own controls failed, else verdicts in words, plots, tables, one journal entry.

Deterministic: no clock and no dice; the same journals give the same bytes, and the entry holds their hashes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.document import Block, Figure, Heading, Paragraph, Table, format_csv, format_html, format_markdown
from experiments.errors import GateFailed, StudyError
from experiments.gates import GateCheck, Ledger, check_gates, count_ledger
from experiments.outcomes import StudyData, outcome_of, read_study
from experiments.paths import StudyPaths
from experiments.plots import PLOTS, draw_plots
from experiments.record import record_report, write_numbers
from experiments.runner import read_registered
from experiments.statistics import compare_paired
from experiments.text import read_shape
from experiments.transients import Transient, find_transients
from experiments.verdicts import Judged, judge_contrasts, judge_factorial, paired_differences
from experiments.words import answer, answer_questions, describe_errors, format_bpb, limits

__all__ = ["Built", "build_report"]

GAIN_SHOWN = 0.05  # bits per byte: below that the start checkpoint cannot do the task


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Where the report lies, in words and as data."""

    text: str
    data: Mapping[str, Any]


def build_report(paths: StudyPaths, directory: Path) -> Built:
    """Write the report. Raises `GateFailed` where a control failed, `StudyError` where there is nothing to compare."""
    plan, history = read_registered(paths)
    data = read_study(plan, history, paths)
    if not data.seeds(plan.study.reference):
        raise StudyError(f"arm {plan.study.reference} has no complete run yet", "`chronicle experiment run` goes on")
    shape, corpora = read_shape(plan)
    ledgers = count_ledger(data, shape)
    checks = check_gates(data, ledgers)
    broken = [check for check in checks if not check.ok]
    if broken:
        named = "; ".join(f"{check.name}: {check.found}" for check in broken[:4])
        raise GateFailed(f"the study's own controls failed, so it has nothing to report: {named}",
                         "find the cause before anything else: an exact restart that is not exact is a bug")  # fmt: skip
    judged = (*judge_contrasts(data), *judge_factorial(data))
    told = answer_questions(plan.study, judged)
    digests = {corpus.name: corpus.digest for corpus in corpora}
    blocks = list(_blocks(data, checks, judged, told, ledgers, digests))
    summary, written = _write(data, judged, ledgers, blocks, directory)
    entry = record_report(paths, data, judged, told, written)
    verdicts = {one.name: str(one.verdict) for one in judged}
    lines = [f"{directory / 'report.md'}"] + [f"{question} {said}" for question, said in told]
    return Built(
        text="\n".join(lines), data={"directory": str(directory), "verdicts": verdicts, "entry": entry, **summary}
    )


def _write(
    data: StudyData, judged: Sequence[Judged], ledgers: Sequence[Ledger], blocks: Sequence[Block], directory: Path
) -> tuple[dict[str, Any], list[Path]]:
    """All files of the report; returns the summary and what was written."""
    directory.mkdir(parents=True, exist_ok=True)
    plots = draw_plots(data, judged, ledgers, directory)
    tables = [block for block in blocks if isinstance(block, Table)]
    for table in tables:
        (directory / f"{table.name}.csv").write_text(format_csv(table), encoding="utf-8")
    (directory / "report.md").write_text(format_markdown(blocks), encoding="utf-8")
    (directory / "report.html").write_text(format_html(blocks, directory), encoding="utf-8")
    summary = write_numbers(data, judged, directory)
    names = [f"{name}.{kind}" for name in plots for kind in ("png", "csv")] + [f"{table.name}.csv" for table in tables]
    names += ["report.md", "report.html", "summary.json", "plan.json", "panel.json"]
    return summary, [directory / name for name in names]


def _blocks(
    data: StudyData, checks: Sequence[GateCheck], judged: Sequence[Judged], told: Sequence[tuple[str, str]],
    ledgers: Sequence[Ledger], digests: Mapping[str, str],
) -> Iterator[Block]:  # fmt: skip
    study, profile = data.plan.study, data.plan.profile
    yield Heading(text=f"{study.title} Study {study.name}, profile {profile.name}", level=1)
    yield Paragraph(text=_what(data))
    yield Heading(text="Answers")
    for question, said in told:
        yield Paragraph(text=f"**{question}** {said}")
    yield from _exactness(data)
    yield Heading(text="Every contrast in words", level=3)
    yield Paragraph(text=describe_errors(study, judged))
    for one in judged:
        yield Paragraph(text=answer(one, study.margin_bpb, study.alpha))
    yield _figure("contrasts")
    yield _contrast_table(judged)
    yield Heading(text="What it does not show")
    for line in limits(data):
        yield Paragraph(text=line)
    yield Heading(text="Controls")
    yield Paragraph(text="All of them held; had one failed there would be no report.")
    yield Table(
        name="controls",
        header=("control", "what", "found"),
        rows=tuple((c.name, c.what, c.found) for c in checks),
        show=12,
    )
    yield _figure("same-until-treated")
    yield Heading(text="Right after a restart")
    yield Paragraph(text="Excess loss over the reference, in bits per byte. On identical batches one seed is "
                         "enough to see it; where "
                         "the order changed, the difference to the reference's local mean contains the noise of "
                         "the batches.")  # fmt: skip
    yield _figure("transients")
    yield from _transient_tables(data)
    yield Heading(text="Along the run")
    for name in ("losses", "differences", "ratios"):
        yield _figure(name)
    yield Heading(text="Outcomes")
    yield _outcome_table(data)
    yield _secondary_table(data)
    yield from _few_shot(data)
    yield Heading(text="Ledger")
    yield Paragraph(text="Counted from the plan, and proved by the logged digest of every batch. The guard's "
                         "word is per launch: "
                         "`warned` where state was lost on purpose and the guard noticed.")  # fmt: skip
    yield _figure("ledger")
    yield _ledger_table(ledgers)
    yield Heading(text="Provenance")
    start = data.start.result.weights if data.start else "none"
    sources = ", ".join(f"`{name}` {digest}" for name, digest in digests.items())
    yield Paragraph(text=f"Plan {data.plan.plan_hash}; definition {study.digest}; common checkpoint (sha256 of "
                         f"its weights) {start}; "
                         f"sources (sha256): {sources}.")  # fmt: skip


def _what(data: StudyData) -> str:
    study, profile = data.plan.study, data.plan.profile
    arms = "; ".join(f"**{name}** {study.arm(name).says} (n = {len(data.seeds(name))})" for name in data.arms)
    return (
        f"Registered before the first launch: primary outcome {study.primary}; margin ±{study.margin_bpb:g} bits per byte; "
        f"two-sided {study.alpha:.0%}. All arms start at the same checkpoint ({profile.start_updates} updates) and make "
        f"{profile.slice_updates * len(study.arms[0].slices)} updates of {profile.batch_size} windows; "
        f"differences are paired by seed.\n\n"
        f"Arms: {arms}."
    )


def _exactness(data: StudyData) -> Iterator[Paragraph]:
    if data.plan.study.gate:
        one, other = data.plan.study.gate
        restarts = max(len(run.restarts) for run in data.of_arm(other))
        yield Paragraph(text=f"**And a restart that loses nothing?** No effect at all: after {restarts} of them {other} is "
                             f"{one} to the last bit.")  # fmt: skip


def _figure(name: str) -> Figure:
    return Figure(name=name, caption=PLOTS[name])


def _contrast_table(judged: Sequence[Judged]) -> Table:
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


def _transient_tables(data: StudyData) -> Iterator[Table]:
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


def _outcome_table(data: StudyData) -> Table:
    names = ("averaged/mixture", *_secondary_names(data))
    rows = [(arm, str(seed), *(f"{outcome_of(data.runs[arm, seed], name):.5f}" for name in names))
            for arm in data.arms for seed in data.seeds(arm)]  # fmt: skip
    return Table(name="outcomes", header=("arm", "seed", *names), rows=tuple(rows), show=16)


def _secondary_table(data: StudyData) -> Table:
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


def _few_shot(data: StudyData) -> Iterator[Block]:
    yield Heading(text="k-shot analogue", level=3)
    final = data.start.result.final if data.start else {}
    for task, keys in (("copy", ("copy/0", "copy/2", "copy/4")), ("recall", ("recall/0", "recall/1"))):
        if not all(key in final for key in keys):
            yield Paragraph(text=f"{task}: windows of {data.plan.profile.window_bytes} bytes are too short for it.")
            continue
        gain = final[keys[0]] - final[keys[-1]]
        told = ", ".join(f"{key} {final[key]:.3f}" for key in keys)
        if gain <= GAIN_SHOWN:
            yield Paragraph(text=f"{task}: **not measurable at this size**. The positive control fails: at the "
                                 f"common checkpoint the "
                                 f"gain is {gain:+.3f} bits per byte ({told}), at or below {GAIN_SHOWN}.")  # fmt: skip
        else:
            means = ", ".join(f"{arm} {np.mean([outcome_of(run, f'{task}-gain') for run in data.of_arm(arm)]):+.3f}"
                              for arm in data.arms)  # fmt: skip
            yield Paragraph(
                text=f"{task}: the common checkpoint gains {gain:+.3f} bits per byte ({told}); at the end, by arm: {means}."
            )


def _ledger_table(ledgers: Sequence[Ledger]) -> Table:
    rows = tuple(
        (one.run, *(f"{n:,}" for n in (one.drawn, one.repeats, one.unread)), _yes(one.as_planned), " ".join(one.guard))
        for one in ledgers
    )
    header = ("run", "drawn", "drawn again", "of the slices never read", "digests as planned", "guard, by launch")
    return Table(name="ledger-table", header=header, rows=rows, show=16)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
