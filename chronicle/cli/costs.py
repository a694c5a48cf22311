"""`chronicle costs`: goodput and lost time by cause. What was not recorded is shown as unknown."""

import time
from collections.abc import Iterable

from chronicle.audit.evidence import RunEvidence, read_evidence
from chronicle.cli.options import IN_RUN, CommandResult, InRun
from chronicle.journal import read_journal
from chronicle.journal.costs import Costs, compute_costs
from chronicle.journal.entries import Entry
from chronicle.journal.events import EntryKind
from chronicle.metrics.log import read_attempts
from chronicle.paths import RunPaths


def costs(at: InRun = IN_RUN) -> CommandResult:
    """Show goodput, lost steps and lost hours by cause.

    It also shows interruptions, and the times to detect, to decide and to recover.

    Example: chronicle costs --run tr-190
    """
    paths = at.existing().paths
    journal = read_journal(paths)
    evidence = read_evidence(paths, journal)
    series, attempts = {}, {}
    for one in evidence.launches:
        timed = _read_times(paths, one.launch)
        series[one.launch] = [(step, time) for _, step, time in timed]
        attempts[one.launch] = [attempt for attempt, _, _ in timed]
    alive = _is_alive(journal.entries)
    found = compute_costs(
        journal.entries, series, attempts, now=time.time() if alive else None, samples_per_step=_samples_per_step(evidence)
    )
    return CommandResult(text="\n".join(_rows(found)), data={"run": paths.run, **found.to_json()})


def _read_times(paths: RunPaths, launch: int) -> list[tuple[int, int, float]]:
    """(attempt, step, time) of each logged step."""
    try:
        points = read_attempts(paths.metrics_path(launch))
        return [(attempt, one.step, one.time) for attempt, one in points if one.time is not None]
    except OSError:
        return []


def _is_alive(entries: Iterable[Entry]) -> bool:
    kinds = {(entry.kind, entry.launch) for entry in entries}
    return any(kind == EntryKind.LAUNCH_START and (EntryKind.LAUNCH_END, launch) not in kinds for kind, launch in kinds)


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
    goodput = "unknown" if found.goodput_fraction is None else f"{found.goodput_fraction:.1%}"
    rows = [
        _row("wall", _time(found.wall_seconds)),
        _row("productive", f"{_time(found.productive_seconds)} (goodput {goodput})"),
        _row("recomputed", f"{_time(found.recomputed_seconds)}, {_count(found.repeated_steps, 'steps')}, "
                           f"{_count(found.repeated_samples, 'samples')} repeated"),
    ]  # fmt: skip
    for lost in found.lost:
        start = "unknown" if lost.from_step is None else f"{lost.from_step}"
        rows.append(f"  {lost.cause.value}: {start} → {lost.to_step}, {_count(lost.steps, 'steps')}, {_time(lost.seconds)}")
    rows.append(_row("interruptions", f"{len(found.interruptions)}, MTBF {_time(found.mtbf_seconds)}, "
                                      f"MTTR {_time(found.mttr_seconds)}"))  # fmt: skip
    for one in found.interruptions:
        rows.append(f"  launch {one.launch}: {one.cause.value}, recovered after {_time(one.recovered_seconds)}")
    rows.append(_row("to detect", ", ".join(map(_time, found.detect_seconds)) or "no event"))
    rows.append(_row("to decide", ", ".join(map(_time, found.decide_seconds)) or "no rollback"))
    rows.append(_row("to resume", ", ".join(map(_time, found.resume_seconds)) or "no launch"))
    tax = "unknown" if found.checkpoint_tax_fraction is None else f"{found.checkpoint_tax_fraction:.1%}"
    rows.append(_row("checkpoint tax", tax))
    rows.append(_row("unverified restarts", str(found.unverified_restarts)))
    return rows


def _row(name: str, text: str) -> str:
    return f"{name:<20} {text}"


def _count(number: int | None, what: str) -> str:
    return f"unknown {what}" if number is None else f"{number:,} {what}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"
