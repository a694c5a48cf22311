"""Why launches ended, and how long it took to see trouble, to decide, and to be training again. Pure over entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any

from chronicle.journal.entries import Entry

__all__ = [
    "Cause",
    "Interruption",
    "interruptions_of",
    "seconds_of",
    "seconds_to_decide",
    "seconds_to_detect",
    "seconds_to_resume",
]

HARDWARE_WINDOW_SECONDS = 15 * 60  # a serious hardware event this long before an end explains it


class Cause(Enum):
    """Why steps were lost or a launch ended."""

    CRASH = "crash"
    DELIBERATE = "deliberate rollback"
    EXPERIMENT = "failed experiment"
    HARDWARE = "hardware"
    PREEMPTED = "preempted"
    PLANNED = "planned"
    SOFTWARE = "software"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """One end of a launch that was not the end of the run. `recovered_seconds`: from there to the next first step."""

    launch: int
    cause: Cause
    time: str
    recovered_seconds: float | None


def interruptions_of(
    entries: Sequence[Entry], series: Mapping[int, Sequence[tuple[int, float]]]
) -> Iterable[Interruption]:
    ends = [entry for entry in entries if entry.kind == "launch.end" and entry.launch is not None]
    numbers = sorted({entry.launch for entry in entries if entry.kind == "launch.start" and entry.launch is not None})
    for entry in ends:
        assert entry.launch is not None
        later = [number for number in numbers if number > entry.launch]
        completed = entry.data.get("exit_code") == 0 and entry.data.get("stopped_by") is None
        if completed and not later:
            continue
        points = series.get(later[0], ()) if later else ()
        recovered = points[0][1] - seconds_of(entry.ts) if points else None
        yield Interruption(
            launch=entry.launch,
            cause=_cause_of_end(entry, entries),
            time=entry.ts,
            recovered_seconds=recovered if recovered is not None and recovered >= 0 else None,
        )


def _cause_of_end(end: Entry, entries: Sequence[Entry]) -> Cause:
    """From what was recorded alone; a supervisor that vanished leaves the cause unknown."""
    when = seconds_of(end.ts)
    for entry in entries:
        if entry.kind == "hardware" and entry.data.get("serious") is True:
            happened = entry.data.get("time") or entry.ts
            if 0 <= when - seconds_of(str(happened)) <= HARDWARE_WINDOW_SECONDS:
                return Cause.HARDWARE
    if end.data.get("inferred"):
        return Cause.UNKNOWN
    if end.data.get("stopped_by") == "proposal":
        return Cause.DELIBERATE
    if end.data.get("stopped_by") == "signal":
        return Cause.PREEMPTED if end.data.get("signal") == "SIGUSR1" else Cause.PLANNED
    return Cause.PLANNED if end.data.get("exit_code") == 0 else Cause.SOFTWARE


def seconds_to_detect(entries: Sequence[Entry], series: Mapping[int, Sequence[tuple[int, float]]]) -> Iterable[float | None]:
    """Onset of an event to the entry that first says it; one value per event."""
    seen: set[Any] = set()
    for entry in entries:
        if entry.kind != "incident" or entry.data.get("tier") == "notice":
            continue
        key = (entry.launch, entry.data.get("id"), entry.data.get("onset_step"))
        onset = entry.data.get("onset_step")
        if key in seen or not isinstance(onset, int):
            continue
        seen.add(key)
        moment = next((time for step, time in series.get(entry.launch or 0, ()) if step >= onset), None)
        yield None if moment is None else max(0.0, seconds_of(entry.ts) - moment)


def seconds_to_decide(entries: Sequence[Entry]) -> Iterable[float | None]:
    """First alarm of a launch to the rollback that answers it; one value per rollback."""
    alarm: float | None = None
    for entry in entries:
        if entry.kind in ("incident", "note") and alarm is None:
            alarm = seconds_of(entry.ts)
        elif entry.kind == "rollback.receipt":
            yield None if alarm is None else max(0.0, seconds_of(entry.ts) - alarm)
            alarm = None
        elif entry.kind == "launch.start":
            alarm = None


def seconds_to_resume(entries: Sequence[Entry], series: Mapping[int, Sequence[tuple[int, float]]]) -> Iterable[float | None]:
    """Start of a launch to its first logged step; one value per launch."""
    for entry in entries:
        if entry.kind == "launch.start":
            points = series.get(entry.launch or 0, ())
            yield max(0.0, points[0][1] - seconds_of(entry.ts)) if points else None


def seconds_of(stamp: str) -> float:
    """Seconds since the epoch of an entry's `ts`."""
    return datetime.fromisoformat(stamp).timestamp()
