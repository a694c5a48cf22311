"""`chronicle costs`: goodput and lost time by cause. What was not recorded is shown as unknown."""

import time

from chronicle.audit.evidence import RunEvidence, read_evidence
from chronicle.cli.options import IN_RUN, CommandResult, InRun
from chronicle.journal import read_journal
from chronicle.journal.costs import Costs, compute_costs
from chronicle.journal.events import EntryKind
from chronicle.metrics.log import read_attempts


def costs(at: InRun = IN_RUN) -> CommandResult:
    """Show goodput, lost steps and lost hours by cause.

    It also shows interruptions, and the times to detect, to decide and to recover.

    Example: chronicle costs --run tr-190
    """
    paths = at.existing().paths
    journal = read_journal(paths)
    evidence = read_evidence(paths, journal)
    series: dict[int, list[tuple[int, float]]] = {}
    attempts: dict[int, list[int]] = {}
    for one in evidence.launches:
        try:
            timed = [pair for pair in read_attempts(paths.metrics_path(one.launch)) if pair[1].time is not None]
        except OSError:
            timed = []
        series[one.launch] = [(point.step, point.time or 0.0) for _, point in timed]
        attempts[one.launch] = [attempt for attempt, _ in timed]
    kinds = {(entry.kind, entry.launch) for entry in journal.entries}
    runs = any(kind == EntryKind.LAUNCH_START and (EntryKind.LAUNCH_END, launch) not in kinds for kind, launch in kinds)
    now = time.time() if runs else None
    found = compute_costs(journal.entries, series, attempts, now=now, samples_per_step=_samples_per_step(evidence))
    return CommandResult(lines=_rows(found), data={"run": paths.run, **found.to_json()})


def _samples_per_step(evidence: RunEvidence) -> float | None:
    """Samples that all ranks read per step, from their own counters; None without counters."""
    for launch in reversed(evidence.launches):
        newest = launch.newest("data").values()
        counted = [
            (one.fields["samples"], one.fields["step"])
            for one in newest
            if one.fields.get("samples") and one.fields.get("step")
        ]
        first = launch.first_step
        if counted and first is not None and len(counted) == len(newest):
            return float(sum(samples / max(1, step - first + 1) for samples, step in counted))
    return None


def _rows(found: Costs) -> list[str]:
    repeated = f"{_count(found.repeated_steps, 'steps')}, {_count(found.repeated_samples, 'samples')} repeated"
    rows = [
        f"{'wall':<20} {_time(found.wall_seconds)}",
        f"{'productive':<20} {_time(found.productive_seconds)} (goodput {_share(found.goodput_fraction)})",
        f"{'recomputed':<20} {_time(found.recomputed_seconds)}, {repeated}",
    ]
    for lost in found.lost:
        start = "unknown" if lost.from_step is None else f"{lost.from_step}"
        rows.append(f"  {lost.cause.value}: {start} → {lost.to_step}, {_count(lost.steps, 'steps')}, {_time(lost.seconds)}")
    between = f"MTBF {_time(found.mtbf_seconds)}, MTTR {_time(found.mttr_seconds)}"
    rows.append(f"{'interruptions':<20} {len(found.interruptions)}, {between}")
    for one in found.interruptions:
        rows.append(f"  launch {one.launch}: {one.cause.value}, recovered after {_time(one.recovered_seconds)}")
    return [
        *rows,
        f"{'to detect':<20} {', '.join(map(_time, found.detect_seconds)) or 'no event'}",
        f"{'to decide':<20} {', '.join(map(_time, found.decide_seconds)) or 'no rollback'}",
        f"{'to resume':<20} {', '.join(map(_time, found.resume_seconds)) or 'no launch'}",
        f"{'checkpoint tax':<20} {_share(found.checkpoint_tax_fraction)}",
        f"{'unverified restarts':<20} {found.unverified_restarts}",
    ]


def _share(fraction: float | None) -> str:
    return "unknown" if fraction is None else f"{fraction:.1%}"


def _count(number: int | None, what: str) -> str:
    return f"unknown {what}" if number is None else f"{number:,} {what}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"
