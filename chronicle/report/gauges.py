"""The state of runs as gauges, in Prometheus' text format, for `/metrics` of `chronicle serve`.

Pure: summaries in, text out. Format: prometheus.io/docs/instrumenting/exposition_formats (0.0.4). What is not known has no
line: a 0 would be a claim.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GAUGES: Mapping[str, str] = {
    "chronicle_step": "Optimizer steps of the present weights.",
    "chronicle_launch": "Number of the last launch.",
    "chronicle_alive": "1 while the last launch runs.",
    "chronicle_value": "The newest value of each logged channel along the lineage.",
    "chronicle_lr_factor": "LR against the first launch's, by the ledger of rollbacks.",
    "chronicle_open_incidents": "Incidents that are open, without notices.",
    "chronicle_proposal_open": "1 while a rollback is proposed and not decided.",
    "chronicle_checkpoint_step": "Step of the newest checkpoint of the lineage.",
    "chronicle_journal_problems": "Lines of the journal that cannot be read or do not fit.",
}
_Sample = tuple[str, Mapping[str, str], float | None]


def exposition(summaries: Iterable[Mapping[str, Any]]) -> str:
    """The metrics of some runs; each summary is what `chronicle status --json` gives."""
    samples = [sample for summary in summaries for sample in _samples(summary)]
    lines: list[str] = []
    for name, words in GAUGES.items():
        known = [(labels, value) for one, labels, value in samples if one == name and value is not None]
        if known:
            lines += [f"# HELP {name} {words}", f"# TYPE {name} gauge"]
            lines += [f"{name}{{{_labels(labels)}}} {_number(float(value))}" for labels, value in known]
    return "\n".join(lines) + "\n"


def _samples(summary: Mapping[str, Any]) -> Iterator[_Sample]:
    run = {"run": str(summary["run"])}
    last, lr, checkpoint = summary.get("last_launch") or {}, summary.get("lr") or {}, summary.get("checkpoint") or {}
    yield "chronicle_step", run, summary.get("step")
    yield "chronicle_launch", run, last.get("launch")
    yield "chronicle_alive", run, None if not last else float(bool(last.get("alive")))
    for name, value in (summary.get("values") or {}).items():
        yield "chronicle_value", {**run, "channel": str(name)}, value
    yield "chronicle_lr_factor", run, lr.get("factor")
    yield "chronicle_open_incidents", run, len(summary.get("open_incidents") or ())
    yield "chronicle_proposal_open", run, float(summary.get("proposal") is not None)
    yield "chronicle_checkpoint_step", run, checkpoint.get("step")
    yield "chronicle_journal_problems", run, summary.get("journal_problems")


def _labels(labels: Mapping[str, str]) -> str:
    escaped = ((name, text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")) for name, text in labels.items())
    return ",".join(f'{name}="{text}"' for name, text in escaped)


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")
