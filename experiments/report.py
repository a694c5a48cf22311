"""Writes the report of a study, in two steps: what was measured, as raw files, and what follows from these files alone.

    journals ── measure ── plan.json, measured.json, CSV ── judge_folder ── report.md, contrasts, summary, plots

So a report can be judged again years later without its runs (`chronicle experiment report FOLDER`). A study whose own controls
failed gets no report. Deterministic: the same files give the same bytes, and the journal entry holds their hashes.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from chronicle.cli.options import CommandResult
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import StudyReport, events_of
from chronicle.journal.writer import store_file
from experiments.design import START, StudyPlan
from experiments.errors import GateFailed, StudyError
from experiments.files import StudyPaths
from experiments.gates import check_gates
from experiments.history import StudyHistory
from experiments.outcomes import StudyData, read_study
from experiments.plots import PLOTS, draw_plots
from experiments.runner import read_registered
from experiments.statistics import Mean, average
from experiments.tables import (
    ReportBlock,
    ReportTable,
    column,
    format_csv,
    format_markdown,
    measured_tables,
    parse_csv,
)
from experiments.verdicts import (
    Judged,
    answer_bounce,
    answer_questions,
    count_units,
    describe_errors,
    format_bpb,
    judge_bounce,
    judge_study,
    paired_differences,
)

VERSION = 1
MEASURED = "measured.json"
RAW = ("outcomes", "controls", "transients", "transient-table")
FOLLOWS = ("contrast-table", "transient-means", "secondary")
FILES = ("plan.json", MEASURED, "summary.json", "report.md", *(f"{name}.csv" for name in (*RAW, *FOLLOWS)),
         *(f"{name}.png" for name in PLOTS))
Transients: TypeAlias = dict[tuple[str, str, str], list[tuple[str, ...]]]  # rows by arm, channel and horizon
DIGITS = 10  # of a number in `summary.json`
SHOWN = {"controls": 12, "outcomes": 16, "transient-table": 0}  # rows of a table on the page


def build_report(paths: StudyPaths, directory: Path) -> CommandResult:
    """Write the report. Raises `GateFailed` where a control failed, `StudyError` where there is nothing to compare."""
    plan, history = read_registered(paths)
    data = read_study(plan, history, paths)
    if not data.seeds(plan.study.reference):
        raise StudyError(f"arm {plan.study.reference} has no complete run yet", "continue with `chronicle experiment run`")
    _measure(data, history, directory)
    folder = _Folder(directory)
    _write_report(folder)
    return _result(folder, entry=_record(paths, folder))


def judge_folder(directory: Path) -> CommandResult:
    """Judge the study whose raw files are in `directory` and write its report there."""
    folder = _Folder(directory)
    _write_report(folder)
    return _result(folder)


def _write_report(folder: _Folder) -> None:
    directory = folder.directory
    for table in (_contrast_table(folder.judged), _transient_means(folder), _secondary(folder)):
        _write_csv(directory, table)
    (directory / "report.md").write_text(format_markdown(list(_blocks(folder))), encoding="utf-8")
    _write_json(directory / "summary.json", _summary(folder))
    draw_plots(folder.plan, folder.tables["transients"], folder.judged, directory)


def _result(folder: _Folder, **more: str) -> CommandResult:
    lines = [str(folder.directory / "report.md"), *(f"{question} {said}" for question, said in folder.told)]
    data = {"directory": str(folder.directory), "verdicts": folder.verdicts, **_summary(folder), **more}
    return CommandResult(lines=lines, data=data)


class _Folder:
    """The raw files of a report, and what follows from them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            self.plan = StudyPlan.from_json(json.loads((directory / "plan.json").read_text(encoding="utf-8")))
            self.measured = json.loads((directory / MEASURED).read_text(encoding="utf-8"))
            self.tables = {}
            for name in RAW:
                self.tables[name] = parse_csv(name, (directory / f"{name}.csv").read_text(encoding="utf-8"), SHOWN.get(name))
        except (OSError, ValueError, KeyError) as problem:
            raise StudyError(f"`{directory}` does not hold the raw files of a report: {problem}") from problem
        outcomes = self.tables["outcomes"]
        self.outcomes = column(outcomes, outcomes.header[2])
        self.transients = _by_arm(self.tables["transient-table"])
        bounces = judge_bounce(self.plan, _excess(self.transients), column(outcomes, "bounce"))
        self.judged = (*judge_study(self.plan, self.outcomes), *bounces)
        self.told = answer_questions(self.plan.study, self.judged)
        self.verdicts = {one.name: str(one.verdict) for one in self.judged}
        if bounces:
            self.told.append(("Does the curve bounce after a restart?", answer_bounce(bounces)))

    @property
    def arms(self) -> list[str]:
        """Arms with an outcome, in the study's order."""
        return [arm for arm in self.plan.arm_names if arm in self.outcomes]

    def mean(self, differences: Mapping[int, float]) -> Mean | None:
        """The mean of values by seed over the independent units."""
        return average(differences, self.plan.unit_of)


# --- What was measured


def _measure(data: StudyData, history: StudyHistory, directory: Path) -> None:
    """Check the controls and write the raw files. Raises `GateFailed`."""
    checks = check_gates(data)
    broken = [check for check in checks if not check.ok]
    if broken:
        named = "; ".join(f"{check.name}: {check.found}" for check in broken[:4])
        raise GateFailed(f"control checks of the study failed, so no results are reported: {named}",
                         "find the cause first: an exact restart that differs is a bug")
    directory.mkdir(parents=True, exist_ok=True)
    for table in measured_tables(data, checks):
        _write_csv(directory, table)
    _write_json(directory / "plan.json", data.plan.to_json())
    _write_json(directory / MEASURED, {
        "v": VERSION, "read": f"trainer: `{shlex.join(data.plan.study.trainer.command)}`",
        "checkpoint": history.done[START][-1].weights if START in history.done else None,
        "restarts": {arm: len(run.restarts) for (arm, _), run in data.runs.items()},
        "stopped": dict(history.stopped), "open": history.open_runs(data.plan)})


# --- What follows


def _blocks(folder: _Folder) -> Iterator[ReportBlock]:
    plan, study, measured = folder.plan, folder.plan.study, folder.measured
    yield f"# {study.title} Study {study.name}, profile {plan.profile.name}"
    arms = "; ".join(f"**{name}** {study.arm(name).says} ({len(folder.outcomes[name])} runs)" for name in folder.arms)
    starts = "the same checkpoint"
    if plan.profile.starts > 1:
        starts = f"one of {plan.profile.starts} checkpoints, crossed with {plan.profile.seeds} orders"
    yield (f"Registered before the first launch: primary outcome {study.primary}; margin ±{study.margin_bpb:g} {study.unit}; "
           f"two-sided {study.alpha:.0%}. All arms start at {starts} ({plan.profile.start_updates} updates) and make "
           f"{plan.profile.slice_updates * len(study.arms[0].slices)} updates; differences are paired by seed. "
           f"{_units(plan)}\n\nArms: {arms}.")
    if measured["open"] or measured["stopped"]:
        whole = sum(run.arm != START for run in plan.runs)
        stopped = "; ".join(f"{run}: {why}" for run, why in measured["stopped"].items())
        yield (f"**This is not the whole registered study: {sum(map(len, folder.outcomes.values()))} of its {whole} runs are "
               "complete.** Its verdicts are those of the complete pairs, and preliminary. Stopped, not in the numbers: "
               f"{stopped or 'none'}. Not run yet: {', '.join(measured['open']) or 'none'}.")
    yield "## Answers"
    for question, said in folder.told:
        yield f"**{question}** {said}"
    if study.gate:
        one, other = study.gate
        number = measured["restarts"][other]
        yield f"**And a restart that loses nothing?** No effect: after {number} of them {other} is {one} to the last bit."
    yield describe_errors(study, folder.judged)
    yield _figure("contrasts", "contrast-table")
    yield _contrast_table(folder.judged)
    number = "one common checkpoint" if plan.profile.starts == 1 else f"{plan.profile.starts} common checkpoints"
    yield (f"What it does not show: it holds for {number}, this data, this size and slices of {plan.profile.slice_updates} "
           "updates, and need not hold for 9 or 80 billion parameters. An arm with one seed allows no inference on lasting "
           "effects. World size, precision and hardware do not change at a restart but where an arm says so.")
    yield "## Controls"
    yield "All of them held; had one failed there would be no report."
    yield folder.tables["controls"]
    yield "## Right after a restart"
    twin = "the twin without restarts" if study.bounce_margin else "the reference"
    yield (f"Excess loss over {twin}, in {study.unit}. On identical batches one seed is enough to see it; where "
           "the order changed, the difference to the reference's local mean contains the noise of the batches.")
    if not study.bounce_margin:
        yield "No margin was registered for a bounce of the curve, so these numbers have no verdict."
    yield _figure("transients")
    yield _transient_means(folder)
    yield folder.tables["transient-table"]
    yield "## Outcomes"
    yield folder.tables["outcomes"]
    yield _secondary(folder)
    yield "## Provenance"
    yield (f"Plan {plan.plan_hash}; definition {plan.study_hash}; common checkpoint (sha256 of its weights) "
           f"{measured['checkpoint']}; {measured['read']}.")


def _units(plan: StudyPlan) -> str:
    kinds = plan.unit_kinds
    if len(kinds) > 1:
        return f"Independent units are {kinds[0]}s and {kinds[1]}s, crossed: both are random effects."
    if kinds == ("seed",):
        return "Every seed is an independent unit."
    return f"The independent unit is the {kinds[0]}: pairs that share it are one observation, their mean."


def _contrast_table(judged: Sequence[Judged]) -> ReportTable:
    """Every contrast with its units, both tests and its verdict."""
    rows = []
    for one in judged:
        r = one.result
        cells = [""] * 9
        if r is not None:
            cells = [str(r.num_pairs), str(r.num_units), format_bpb(r.mean), _span(r.low, r.high), f"{r.t_p:.4f}",
                     f"{r.sign_flip_p:.4f}", _span(r.inner_low, r.inner_high), f"{r.tost_p:.4f}",
                     f"{r.rank_p:.4f} / {r.rank_tost_p:.4f}"]
        rows.append((one.name, one.asked.formula, *cells, str(one.verdict)))
    header = ("contrast", "difference", "pairs", "independent units", "mean", "95 % interval", "t p", "sign-flip p",
              "90 % interval", "TOST p", "signed-rank p / TOST", "verdict")
    return ReportTable("contrast-table", header, rows)


def _span(low: float, high: float) -> str:
    return f"{format_bpb(low)} … {format_bpb(high)}"


def _transient_means(folder: _Folder) -> ReportTable:
    """Means by arm, channel and horizon; the interval is over independent units, of the mean of a run's restarts."""
    rows = []
    for (arm, channel, horizon), items in folder.transients.items():
        over_units = folder.mean(_by_seed(items))
        interval = f"{over_units.interval(0.95)[0]:+.3f} … {over_units.interval(0.95)[1]:+.3f}" if over_units else ""
        is_same = all(row[3] == "yes" for row in items)
        area, peak = (np.mean([float(row[number]) for row in items]) for number in (5, 6))
        recovered = float(np.median([float(row[7] or row[4]) for row in items]))
        rows.append((arm, channel, horizon, str(len(items)), "yes" if is_same else "no", f"{area:+.3f}", interval,
                     f"{peak:+.3f}", f"{recovered:g}"))
    header = ("arm", "channel", "updates after a restart", "restarts", "identical batches", "area (× updates)",
              "95 % interval over independent units", "peak", "median updates to recover")
    return ReportTable("transient-means", header, rows)


def _by_arm(table: ReportTable) -> Transients:
    found: Transients = {}
    for row in table.rows:
        found.setdefault((row[0].rpartition("-s")[0], row[2], row[4]), []).append(row)
    return found


def _by_seed(items: Sequence[tuple[str, ...]]) -> dict[int, float]:
    """The mean area of a run's restarts, from rows of the table of transients."""
    areas: dict[int, list[float]] = {}
    for row in items:
        areas.setdefault(int(row[0].rpartition("-s")[2]), []).append(float(row[5]))
    return {seed: float(np.mean(values)) for seed, values in areas.items()}


def _excess(transients: Transients) -> dict[tuple[str, int], dict[int, float]]:
    """The mean excess of the training loss after restarts, by arm and horizon, then by seed."""
    found = {}
    for (arm, channel, horizon), items in transients.items():
        if channel == "loss":
            found[arm, int(horizon)] = {seed: area / int(horizon) for seed, area in _by_seed(items).items()}
    return found


def _secondary(folder: _Folder) -> ReportTable:
    """Differences on the other outcomes, without verdicts: they were not registered as primary."""
    rows, outcomes = [], folder.tables["outcomes"]
    for contrast in folder.plan.study.contrasts:
        for name in outcomes.header[3:]:
            found = folder.mean(paired_differences(column(outcomes, name), contrast.plus, contrast.minus))
            if found is not None:
                number = str(round(found.df + 1))
                rows.append((contrast.name, name, number, format_bpb(found.mean), _span(*found.interval(0.95))))
    header = ("contrast", "outcome (not primary, no verdict)", "independent units", "mean", "95 % interval")
    return ReportTable("secondary", header, rows, 24)


def _figure(name: str, numbers: str = "") -> str:
    return f"![{PLOTS[name]}]({name}.png)\n\n{PLOTS[name]} Numbers: [{numbers or name}.csv]({numbers or name}.csv)."


def _summary(folder: _Folder) -> dict[str, Any]:
    contrasts = {}
    for one in folder.judged:
        r = one.result
        if r is not None:
            numbers = {name: _rounded(value) for name, value in asdict(r).items()}
            contrasts[one.name] = {**numbers, "n": count_units(one), "verdict": str(one.verdict)}
    plan = folder.plan
    return {"study": plan.study.name, "profile": plan.profile.name, "plan_hash": plan.plan_hash, "contrasts": contrasts,
            "stopped": folder.measured["stopped"], "open": folder.measured["open"]}


def _rounded(value: Any) -> Any:
    """A number without its last digits, which another type of CPU computes otherwise."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return value


# --- The journal entry


def _record(paths: StudyPaths, folder: _Folder) -> str:
    """Write the journal entry of this report (docs/studies.md) and return its id; an equal report gets no second entry."""
    files = {name: hashlib.sha256((folder.directory / name).read_bytes()).hexdigest() for name in FILES}
    for entry, report in events_of(read_journal(paths.journal).entries, StudyReport):
        if dict(report.files) == files:
            return entry.id
    plan, measured, verdicts, evidence, arms = folder.plan, folder.measured, folder.verdicts, [], []
    for name, caption in PLOTS.items():
        stored = store_file(paths.journal, folder.directory / f"{name}.png")
        evidence.append({**stored, "kind": "plot", "what": caption})
    for arm in map(plan.study.arm, folder.arms):
        read = " ".join(map(str, arm.slices))
        arms.append({"id": arm.name, "name": arm.says, "restarts": measured["restarts"][arm.name], "data": read})
    report = StudyReport(
        plan_hash=plan.plan_hash, study=plan.study.name, profile=plan.profile.name, checkpoint=measured["checkpoint"],
        seeds=tuple(sorted(set().union(*folder.outcomes.values()))), verdicts=verdicts, stopped=measured["stopped"],
        arms=tuple(arms), questions=tuple({"q": q, "answer": said} for q, said in folder.told),
        evidence=tuple(evidence), files=files)
    settled = ", ".join(f"{name} {verdict}" for name, verdict in verdicts.items())
    with JournalWriter(paths.journal) as writer:
        return writer.write(report, title=f"{plan.study.title} {settled}"[:200]).id


def _write_csv(directory: Path, table: ReportTable) -> None:
    (directory / f"{table.name}.csv").write_text(format_csv(table), encoding="utf-8")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
