"""Writes the report of a study: verdicts in words, plots, tables, and one journal entry.

A study whose own controls failed gets no report. Deterministic: the same journals give the same bytes, and the entry
holds their hashes.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import StudyReport, events_of
from chronicle.journal.writer import store_file
from experiments.design import START
from experiments.errors import GateFailed, StudyError
from experiments.files import StudyPaths
from experiments.gates import GateCheck, Ledger, check_gates, count_ledger
from experiments.order import read_shape
from experiments.outcomes import PROBE_GAIN, StudyData, outcome_of, read_study
from experiments.plots import PLOTS, draw_plots
from experiments.runner import read_registered
from experiments.tables import (
    ReportBlock,
    ReportTable,
    build_panel,
    checkpoint_table,
    contrast_table,
    format_csv,
    format_markdown,
    ledger_table,
    list_arms,
    outcome_table,
    secondary_table,
    transient_tables,
)
from experiments.verdicts import (
    Judged,
    answer,
    answer_questions,
    describe_errors,
    judge_contrasts,
    judge_factorial,
    limits,
)

__all__ = [
    "Built",
    "build_report",
    "record_report",
    "write_numbers",
]

GAIN_SHOWN = 0.05  # bits per byte: below that the start checkpoint cannot do the task


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The report as printed text and as data."""

    text: str
    data: Mapping[str, Any]


def build_report(paths: StudyPaths, directory: Path) -> Built:
    """Write the report. Raises `GateFailed` where a control failed, `StudyError` where there is nothing to compare."""
    plan, history = read_registered(paths)
    data = read_study(plan, history, paths)
    if not data.seeds(plan.study.reference):
        raise StudyError(f"arm {plan.study.reference} has no complete run yet", "continue with `chronicle experiment run`")
    shape, corpora = read_shape(plan) if plan.study.trainer is None else (None, ())
    ledgers = count_ledger(data, shape)
    checks = check_gates(data, ledgers)
    broken = [check for check in checks if not check.ok]
    if broken:
        named = "; ".join(f"{check.name}: {check.found}" for check in broken[:4])
        raise GateFailed(f"control checks of the study failed, so no results are reported: {named}",
                         "find the cause first: an exact restart that differs is a bug")  # fmt: skip
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
    data: StudyData, judged: Sequence[Judged], ledgers: Sequence[Ledger], blocks: Sequence[ReportBlock], directory: Path
) -> tuple[dict[str, Any], list[Path]]:
    """Write all files of the report; return the summary and the written paths."""
    directory.mkdir(parents=True, exist_ok=True)
    plots = draw_plots(data, judged, ledgers, directory)
    tables = [block for block in blocks if isinstance(block, ReportTable)]
    for table in tables:
        (directory / f"{table.name}.csv").write_text(format_csv(table), encoding="utf-8")
    (directory / "report.md").write_text(format_markdown(blocks), encoding="utf-8")
    summary = write_numbers(data, judged, directory)
    names = [f"{name}.{kind}" for name in plots for kind in ("png", "csv")] + [f"{table.name}.csv" for table in tables]
    names += ["report.md", "summary.json", "plan.json", "panel.json"]
    return summary, [directory / name for name in names]


def _blocks(
    data: StudyData, checks: Sequence[GateCheck], judged: Sequence[Judged], told: Sequence[tuple[str, str]],
    ledgers: Sequence[Ledger], digests: Mapping[str, str],
) -> Iterator[ReportBlock]:  # fmt: skip
    study, profile = data.plan.study, data.plan.profile
    yield f"# {study.title} Study {study.name}, profile {profile.name}"
    yield _what(data)
    if data.open or data.stopped:
        whole = len([run for run in data.plan.runs if run.arm != START])
        yield (f"**This is not the whole registered study: {len(data.runs)} of its {whole} runs are complete** "
               f"({len(data.open)} not run yet, {len(data.stopped)} stopped; named below). Its verdicts are those of the "
               "complete pairs, and preliminary.")  # fmt: skip
    yield "## Answers"
    for question, said in told:
        yield f"**{question}** {said}"
    yield from _exactness(data)
    yield "### Every contrast in words"
    yield describe_errors(study, judged)
    for one in judged:
        yield answer(one, study.margin_bpb, study.alpha)
    yield _figure("contrasts")
    yield contrast_table(judged)
    if profile.starts > 1:
        yield ("By common checkpoint, and over orders alone (the mean over the checkpoints is one observation; no verdict "
               "rests on it):")  # fmt: skip
        yield checkpoint_table(data, judged)
    yield "## What it does not show"
    yield from limits(data)
    yield "## Controls"
    yield "All of them held; had one failed there would be no report."
    yield ReportTable(
        name="controls",
        header=("control", "what", "found"),
        rows=tuple((c.name, c.what, c.found) for c in checks),
        show=12,
    )
    yield _figure("same-until-treated")
    yield "## Right after a restart"
    yield (f"Excess loss over the reference, in {study.unit}. On identical batches one seed is "
           "enough to see it; where "
           "the order changed, the difference to the reference's local mean contains the noise of "
           "the batches.")  # fmt: skip
    yield _figure("transients")
    yield from transient_tables(data)
    yield "## Along the run"
    for name in ("losses", "differences", "ratios") if study.trainer is None else ("losses", "differences"):
        yield _figure(name)
    yield "## Outcomes"
    yield outcome_table(data)
    yield secondary_table(data)
    if study.trainer is not None and study.trainer.probe:
        yield from _probe(data, study.trainer.probe)
    if study.trainer is None:
        yield from _few_shot(data)
        yield from _ledger(ledgers)
    yield "## Provenance"
    start = data.start.result.weights if data.start else "none"
    words = ", ".join(f"`{name}` {digest}" for name, digest in digests.items())
    read = f"sources (sha256): {words}" if study.trainer is None else f"trainer: `{shlex.join(study.trainer.command)}`"
    yield f"Plan {data.plan.plan_hash}; definition {study.digest}; common checkpoint (sha256 of its weights) {start}; {read}."


def _ledger(ledgers: Sequence[Ledger]) -> Iterator[ReportBlock]:
    yield "## Ledger"
    yield ("Counted from the plan, and proved by the logged digest of every batch. The guard's "
           "word is per launch: "
           "`warned` where state was lost on purpose and the guard noticed.")  # fmt: skip
    yield _figure("ledger")
    yield ledger_table(ledgers)


def _what(data: StudyData) -> str:
    study, profile = data.plan.study, data.plan.profile
    arms = "; ".join(f"**{name}** {study.arm(name).says} (n = {len(data.seeds(name))})" for name in data.arms)
    return (
        f"Registered before the first launch: primary outcome {study.primary}; margin ±{study.margin_bpb:g} {study.unit}; "
        f"two-sided {study.alpha:.0%}. All arms start at {_checkpoints(data)} ({profile.start_updates} updates) and make "
        f"{profile.slice_updates * len(study.arms[0].slices)} updates"
        f"{f' of {profile.batch_size} windows' if profile.batch_size else ''}; "
        f"differences are paired by seed.\n\n"
        f"Arms: {arms}."
    )


def _checkpoints(data: StudyData) -> str:
    number, orders = data.plan.profile.starts, data.plan.profile.seeds
    return "the same checkpoint" if number == 1 else f"one of {number} checkpoints, crossed with {orders} orders"


def _exactness(data: StudyData) -> Iterator[str]:
    if data.plan.study.gate:
        one, other = data.plan.study.gate
        restarts = max(len(run.restarts) for run in data.of_arm(other))
        yield (f"**And a restart that loses nothing?** No effect at all: after {restarts} of them {other} is "
               f"{one} to the last bit.")  # fmt: skip


def _figure(name: str) -> str:
    return f"![{PLOTS[name]}]({name}.png)\n\n{PLOTS[name]} Numbers: [{name}.csv]({name}.csv)."


def _few_shot(data: StudyData) -> Iterator[ReportBlock]:
    yield "### k-shot analogue"
    final = data.start.result.final if data.start else {}
    for task, keys in (("copy", ("copy/0", "copy/2", "copy/4")), ("recall", ("recall/0", "recall/1"))):
        if not all(key in final for key in keys):
            yield f"{task}: windows of {data.plan.profile.window_bytes} bytes are too short for it."
            continue
        gain = final[keys[0]] - final[keys[-1]]
        told = ", ".join(f"{key} {final[key]:.3f}" for key in keys)
        if gain <= GAIN_SHOWN:
            yield (f"{task}: **not measurable at this size**. The positive control fails: at the "
                   f"common checkpoint the "
                   f"gain is {gain:+.3f} bits per byte ({told}), at or below {GAIN_SHOWN}.")  # fmt: skip
        else:
            means = ", ".join(f"{arm} {np.mean([outcome_of(run, f'{task}-gain') for run in data.of_arm(arm)]):+.3f}"
                              for arm in data.arms)  # fmt: skip
            yield f"{task}: the common checkpoint gains {gain:+.3f} bits per byte ({told}); at the end, by arm: {means}."


def _probe(data: StudyData, channels: tuple[str, ...]) -> Iterator[ReportBlock]:
    """What examples gain, and whether the common checkpoints could use them at all."""
    yield "### What examples gain"
    found = [[start.result.final.get(channel, np.nan) for channel in channels] for start in data.starts]
    gains = [without - given for without, given in found]
    told = ", ".join(f"{gain:+.3f}" for gain in gains)
    if not gains or not min(gains) > GAIN_SHOWN:
        yield (f"**Not measurable at this size**: `{channels[0]}` − `{channels[1]}` at the common checkpoints is "
               f"{told or 'unknown'} {data.plan.study.unit}, and {GAIN_SHOWN} was asked of each.")  # fmt: skip
        return
    means = ", ".join(f"{arm} {np.mean([outcome_of(run, PROBE_GAIN) for run in data.of_arm(arm)]):+.4f}" for arm in data.arms)
    yield (f"The probe sees something: `{channels[0]}` − `{channels[1]}` at the common checkpoints is {told} "
           f"{data.plan.study.unit}, above {GAIN_SHOWN} at each. At the end, by arm: {means}. Differences: the table of other "
           "outcomes, without a verdict.")  # fmt: skip


# --- Files and journal entry of a report

PANEL = "panel.json"


def write_numbers(data: StudyData, judged: Sequence[Judged], directory: Path) -> dict[str, Any]:
    """Write `summary.json`, `plan.json` and `panel.json`; returns the summary."""
    contrasts = {one.name: {"mean": one.result.mean, "low": one.result.interval.low, "high": one.result.interval.high,
                            "n": one.result.num_pairs, "verdict": str(one.verdict)}
                 for one in judged if one.result is not None}  # fmt: skip
    summary = {"study": data.plan.study.name, "profile": data.plan.profile.name, "plan_hash": data.plan.plan_hash,
               "contrasts": contrasts, "stopped": dict(data.stopped), "open": list(data.open)}  # fmt: skip
    _write_file(directory / "summary.json", summary)
    _write_file(directory / "plan.json", data.plan.to_json())
    _write_file(directory / PANEL, build_panel(data, judged), indent=None)
    return summary


def record_report(
    paths: StudyPaths, data: StudyData, judged: Sequence[Judged], told: Sequence[tuple[str, str]], written: Sequence[Path]
) -> str:
    """Write the journal entry of this report (docs/studies.md) and return its id; an equal report gets no second entry."""
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(written)}
    for entry, report in events_of(read_journal(paths.journal).entries, StudyReport):
        if dict(report.files) == files:
            return entry.id
    verdicts = {one.name: str(one.verdict) for one in judged}
    report = StudyReport(
        plan_hash=data.plan.plan_hash, study=data.plan.study.name, profile=data.plan.profile.name,
        checkpoint=data.start.result.weights if data.start else None,
        seeds=tuple(sorted({seed for _, seed in data.runs})), verdicts=verdicts, stopped=dict(data.stopped),
        arms=tuple(list_arms(data)), questions=tuple({"q": question, "answer": answer} for question, answer in told),
        evidence=tuple(_attach(paths, written)), files=files)  # fmt: skip
    settled = ", ".join(f"{name} {verdict}" for name, verdict in verdicts.items())
    with JournalWriter(paths.journal) as writer:
        return writer.write(report, title=f"{data.plan.study.title} {settled}"[:200]).id


def _attach(paths: StudyPaths, written: Sequence[Path]) -> list[dict[str, Any]]:
    kinds = {PANEL: ("panel", "curves, outcomes and contrasts as numbers")}
    kinds |= {f"{name}.png": ("plot", caption) for name, caption in PLOTS.items()}
    return [{**store_file(paths.journal, path), "kind": kinds[path.name][0], "what": kinds[path.name][1]}
            for path in sorted(written) if path.name in kinds]  # fmt: skip


def _write_file(path: Path, value: Any, indent: int | None = 1) -> None:
    path.write_text(json.dumps(value, indent=indent, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
