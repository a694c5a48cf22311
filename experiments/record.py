"""What a report leaves behind beside its page: summary, plan, panel, and one entry of the journal with their hashes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.objects import store_file
from experiments.history import REPORT
from experiments.outcomes import StudyData
from experiments.panel import build_panel, list_arms
from experiments.files import StudyPaths
from experiments.plots import PLOTS
from experiments.verdicts import Judged

__all__ = ["record_report", "write_numbers"]

PANEL = "panel.json"


def write_numbers(data: StudyData, judged: Sequence[Judged], directory: Path) -> dict[str, Any]:
    """Write `summary.json`, `plan.json` and `panel.json`; returns the summary."""
    contrasts = {one.name: {"mean": one.result.mean, "low": one.result.interval.low, "high": one.result.interval.high,
                            "n": one.result.num_pairs, "verdict": str(one.verdict)}
                 for one in judged if one.result is not None}  # fmt: skip
    summary = {"study": data.plan.study.name, "profile": data.plan.profile.name, "plan_hash": data.plan.plan_hash,
               "contrasts": contrasts, "stopped": dict(data.stopped), "open": list(data.open)}  # fmt: skip
    _write(directory / "summary.json", summary)
    _write(directory / "plan.json", data.plan.to_json())
    _write(directory / PANEL, build_panel(data, judged), indent=None)
    return summary


def record_report(
    paths: StudyPaths, data: StudyData, judged: Sequence[Judged], told: Sequence[tuple[str, str]], written: Sequence[Path]
) -> str:
    """Journal one entry for this report (docs/studies.md), returns its id; the same report again is not written again."""
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(written)}
    for entry in read_journal(paths.journal).of_kind(REPORT):
        if dict(entry.data.get("files", {})) == files:
            return entry.id
    verdicts = {one.name: str(one.verdict) for one in judged}
    record = {"plan_hash": data.plan.plan_hash, "study": data.plan.study.name, "profile": data.plan.profile.name,
              "checkpoint": data.start.result.weights if data.start else None,
              "seeds": sorted({seed for _, seed in data.runs}), "verdicts": verdicts, "stopped": dict(data.stopped),
              "arms": list_arms(data), "questions": [{"q": question, "answer": answer} for question, answer in told],
              "evidence": [*_attach(paths, written)], "files": files}  # fmt: skip
    settled = ", ".join(f"{name} {verdict}" for name, verdict in verdicts.items())
    with JournalWriter(paths.journal) as writer:
        return writer.append(REPORT, title=f"{data.plan.study.title} {settled}"[:200], data=record).id


def _attach(paths: StudyPaths, written: Sequence[Path]) -> list[dict[str, Any]]:
    kinds = {PANEL: ("panel", "curves, outcomes and contrasts as numbers")}
    kinds |= {f"{name}.png": ("plot", caption) for name, caption in PLOTS.items()}
    return [{**store_file(paths.journal, path), "kind": kinds[path.name][0], "what": kinds[path.name][1]}
            for path in sorted(written) if path.name in kinds]  # fmt: skip


def _write(path: Path, value: Any, indent: int | None = 1) -> None:
    path.write_text(json.dumps(value, indent=indent, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
