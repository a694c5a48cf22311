"""What a run cost beyond its steps: goodput, lost work by cause, interruptions, times to detect, decide and recover.

Computed from entries and from the times of logged steps; reads no file. Definitions: launch_resume_evidence §6. What was not
recorded is None and is shown as unknown, not as 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import Enum
from itertools import pairwise
from typing import Any

from chronicle.journal.entries import Entry
from chronicle.journal.events import (
    CheckpointSaved,
    EndCause,
    EntryKind,
    GuardVerdict,
    Incident,
    LaunchAttempt,
    LaunchEnd,
    LaunchStart,
    RollbackReceipt,
    events_of,
    is_more_telling,
)
from chronicle.journal.lineage import FIRST_STEP, Lineage, compute_lineage

NODE_KINDS = frozenset((EntryKind.LAUNCH_START, EntryKind.LAUNCH_END))  # written once per node
ALARMS = frozenset((EntryKind.INCIDENT, EntryKind.NOTE))
ENDS = frozenset((EntryKind.LAUNCH_END, EntryKind.ROLLBACK_RECEIPT))
Series = Mapping[int, Sequence[tuple[int, float]]]  # (step, time) of the logged steps, by launch
Attempts = Mapping[int, Sequence[int]]  # which start of the ranks wrote each of them
StepSeconds = Mapping[int, Mapping[int, float]]  # seconds of each step, by launch
DECISIONS = ALARMS | {EntryKind.ROLLBACK_RECEIPT, EntryKind.LAUNCH_START}


# --- launches over several nodes ----------------------------------------------------------------------------------------


def merge_nodes(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """The entries with one start and one end per launch, however many nodes wrote them.

    The first node's start is kept. Of the ends, the first that is not well is kept, else the last; with the most telling cause
    of all of them.
    """
    kept = tuple(entries)
    chosen: dict[tuple[str, int], Entry] = {}
    for entry in kept:
        if entry.launch is None or entry.kind not in NODE_KINDS:
            continue
        key = entry.kind, entry.launch
        before = chosen.get(key)
        if before is None or (entry.kind == EntryKind.LAUNCH_END and end_is_well(before)):
            chosen[key] = entry
    told = {entry.id: entry for entry in chosen.values()}
    for entry, end in events_of(kept, LaunchEnd):
        mine = chosen.get((entry.kind, entry.launch or 0))
        if mine is not None and not end_is_well(entry) and is_more_telling(end.cause, told[mine.id].data.get("cause")):
            told[mine.id] = replace(told[mine.id], data={**mine.data, "cause": end.cause, "because": end.because})
    return tuple(told.get(e.id, e) for e in kept if e.kind not in NODE_KINDS or e.launch is None or e.id in told)


def end_is_well(end: Entry) -> bool:
    """Whether a node ended with code 0. An inferred end has no code and is not well."""
    return LaunchEnd.of(end).exit_code == 0


# --- why launches ended, and how long detection, decision and restart took ----------------------------------------------


class Cause(Enum):
    """Why steps were lost or a launch ended."""

    CRASH = "crash"
    DELIBERATE = "deliberate rollback"
    DISK_FULL = "disk full"
    EXPERIMENT = "failed experiment"
    HANG = "hang"
    NODE_LOST = "node lost"
    OUT_OF_MEMORY = "out of memory"
    PREEMPTED = "preempted"
    PLANNED = "planned"
    REFUSED = "refused"
    TIME_LIMIT = "time limit"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """The end of a launch that was not the end of the run. `recovered_seconds`: until the first step of the next launch."""

    launch: int
    cause: Cause
    time: str
    recovered_seconds: float | None


def interruptions_of(entries: Sequence[Entry], series: Series) -> Iterable[Interruption]:
    """Every end of a launch, except that of a last launch that completed."""
    numbers = sorted({entry.launch for entry, _ in events_of(entries, LaunchStart) if entry.launch is not None})
    for entry, attempt in events_of(entries, LaunchAttempt):
        moment = attempt.began or seconds_of(entry.ts)
        after = (time for _, time in series.get(entry.launch or 0, ()) if time >= moment)
        yield from _interruption(entry, attempt.cause, moment, next(after, None))
    for entry, end in events_of(entries, LaunchEnd):
        later = [number for number in numbers if number > (entry.launch or 0)]
        if later or end.exit_code != 0 or end.stopped_by is not None:
            points = series.get(later[0], ()) if later else ()
            yield from _interruption(entry, end.cause, seconds_of(entry.ts), points[0][1] if points else None)


def _interruption(entry: Entry, cause: str | None, moment: float, again: float | None) -> Iterable[Interruption]:
    """The interruption that an entry of a launch tells. `again`: when the next step was logged."""
    recovered = None if again is None or again < moment else again - moment
    if entry.launch is not None:
        named = END_CAUSES.get(cause, Cause.UNKNOWN)
        yield Interruption(launch=entry.launch, cause=named, time=entry.ts, recovered_seconds=recovered)


# A launch that ended as it was meant to, or by a person, is planned. All others keep their name. What nobody recorded is
# unknown: that a device failed at about that time explains nothing.
END_CAUSES: Mapping[str | None, Cause] = {
    **{cause.value: cause for cause in Cause},
    EndCause.FINISHED.value: Cause.PLANNED,
    EndCause.ENDED.value: Cause.PLANNED,
    EndCause.EARLY.value: Cause.UNKNOWN,
    EndCause.STOPPED.value: Cause.PLANNED,
    EndCause.PROPOSAL.value: Cause.DELIBERATE,
}


def seconds_to_detect(entries: Sequence[Entry], series: Series) -> Iterable[float | None]:
    """Seconds from the onset of each event to its first entry, one value per event."""
    seen: set[tuple[int | None, int | None, int]] = set()
    for entry, incident in events_of(entries, Incident):
        onset = incident.onset_step
        if incident.tier == "notice" or onset is None:
            continue
        key = (entry.launch, incident.id, onset)
        if key in seen:
            continue
        seen.add(key)
        moment = next((time for step, time in series.get(entry.launch or 0, ()) if step >= onset), None)
        yield None if moment is None else max(0.0, seconds_of(entry.ts) - moment)


def seconds_to_decide(entries: Sequence[Entry]) -> Iterable[float | None]:
    """Seconds from the first alarm of a launch to the rollback that answers it, one value per rollback."""
    alarm: float | None = None
    for entry in (one for one in entries if one.kind in DECISIONS):
        if entry.kind in ALARMS and alarm is None:
            alarm = seconds_of(entry.ts)
        elif entry.kind == EntryKind.ROLLBACK_RECEIPT:
            yield None if alarm is None else max(0.0, seconds_of(entry.ts) - alarm)
            alarm = None
        elif entry.kind == EntryKind.LAUNCH_START:
            alarm = None


def seconds_to_resume(entries: Sequence[Entry], series: Series) -> Iterable[float | None]:
    """Seconds from the start of each launch to its first logged step, one value per launch."""
    for entry, _ in events_of(entries, LaunchStart):
        points = series.get(entry.launch or 0, ())
        yield max(0.0, points[0][1] - seconds_of(entry.ts)) if points else None


def seconds_of(stamp: str) -> float:
    """Seconds since the epoch of an entry's `ts`."""
    return datetime.fromisoformat(stamp).timestamp()


# --- all costs of a run -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWork:
    """Steps that no longer count. `steps` is None where the last step before the rollback was not logged."""

    cause: Cause
    from_launch: int | None
    from_step: int | None
    to_step: int
    steps: int | None
    seconds: float | None
    entry: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of one run in seconds, steps and fractions. None: unknown."""

    wall_seconds: float | None
    productive_seconds: float | None
    goodput_fraction: float | None
    lost: tuple[LostWork, ...]
    interruptions: tuple[Interruption, ...]
    recomputed_seconds: float | None
    repeated_steps: int | None
    repeated_samples: int | None
    detect_seconds: tuple[float | None, ...]
    decide_seconds: tuple[float | None, ...]
    resume_seconds: tuple[float | None, ...]
    mtbf_seconds: float | None
    mttr_seconds: float | None
    checkpoint_tax_fraction: float | None
    unverified_restarts: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        data = asdict(self)
        for key in ("lost", "interruptions"):
            data[key] = [row | {"cause": row["cause"].value} for row in data[key]]
        return data


def compute_costs(
    entries: Sequence[Entry],
    series: Series,
    attempts: Attempts | None = None,
    *,
    now: float | None = None,
    samples_per_step: float | None = None,
) -> Costs:
    """The costs of a run from its journal and its logged (step, time) pairs by launch. `now`: the end of a run still alive.

    `attempts`: for each pair of a launch the start of its ranks that wrote it, as the log carries it.
    """
    entries = merge_nodes(entries)
    attempts = _attempts_of(entries, series, attempts or {})
    observed = {number: (points[0][0], max(step for step, _ in points)) for number, points in series.items() if points}
    lineage = compute_lineage(entries, observed)
    step_seconds = {number: _seconds_by_step(points, attempts.get(number, ())) for number, points in series.items()}
    wall = _wall(entries, series, now)
    productive = _productive(lineage, step_seconds)
    interruptions = tuple(interruptions_of(entries, series))
    causes = {one.launch: one.cause for one in interruptions}  # the last one of a launch is its end
    lost = (*_lost_work(entries, lineage, step_seconds, causes), *_lost_in_attempts(entries, series, attempts))
    unplanned = [one for one in interruptions if one.cause is not Cause.PLANNED]
    repeated = _sum(row.steps for row in lost)
    saves = [saved.save_seconds for _, saved in events_of(entries, CheckpointSaved)]
    return Costs(
        wall_seconds=wall,
        productive_seconds=productive,
        goodput_fraction=productive / wall if productive is not None and wall else None,
        lost=lost,
        interruptions=interruptions,
        recomputed_seconds=_sum(row.seconds for row in lost),
        repeated_steps=repeated,
        repeated_samples=round(repeated * samples_per_step) if repeated is not None and samples_per_step else None,
        detect_seconds=tuple(seconds_to_detect(entries, series)),
        decide_seconds=tuple(seconds_to_decide(entries)),
        resume_seconds=tuple(seconds_to_resume(entries, series)),
        mtbf_seconds=wall / len(unplanned) if wall and unplanned else None,
        mttr_seconds=_mean(one.recovered_seconds for one in unplanned),
        checkpoint_tax_fraction=sum(s for s in saves if s) / wall if wall and saves and None not in saves else None,
        unverified_restarts=_unverified(entries, lineage),
    )


def _attempts_of(
    entries: Sequence[Entry], series: Series, carried: Attempts
) -> Attempts:
    """The attempt of each logged step, of launches that had several: as the log says, else by when each attempt began."""
    began: dict[int, list[float]] = {}
    for entry, attempt in events_of(entries, LaunchAttempt):
        if entry.launch is not None:
            began.setdefault(entry.launch, []).append(attempt.began or seconds_of(entry.ts))
    known = {number: whose for number, whose in carried.items() if any(whose)}
    return known | {
        number: [bisect_right(sorted(moments), time) for _, time in series.get(number, ())]
        for number, moments in began.items()
        if number not in known
    }


def _seconds_by_step(points: Sequence[tuple[int, float]], attempts: Sequence[int] = ()) -> dict[int, float]:
    """Seconds of each step. A log that writes every tenth step shares the time among the ten; the first point has none.

    Nor has the first of an attempt: before it the ranks were started again.
    """
    seconds: dict[int, float] = {}
    for place, ((before, start), (after, end)) in enumerate(pairwise(points)):
        if after > before and end >= start and (not attempts or attempts[place] == attempts[place + 1]):
            seconds.update(dict.fromkeys(range(before + 1, after + 1), (end - start) / (after - before)))
    return seconds


def _productive(lineage: Lineage, step_seconds: StepSeconds) -> float | None:
    """Seconds of the steps of the lineage; None when no step was timed."""
    times = [
        step_seconds[kept.launch][step]
        for kept in lineage.kept
        for step in range(kept.first, kept.last + 1)
        if step in step_seconds.get(kept.launch, {})
    ]
    return sum(times) if times else None


def _lost_work(
    entries: Sequence[Entry], lineage: Lineage, step_seconds: StepSeconds, causes: Mapping[int, Cause]
) -> Iterable[LostWork]:
    """Steps that rollbacks discarded; then steps done again because a launch resumed below the last step of the one before."""
    receipts = {entry.id: receipt for entry, receipt in events_of(entries, RollbackReceipt)}
    after_rollback: set[int | None] = set()
    for mark in lineage.rollbacks:
        experiment = mark.from_launch in after_rollback or bool(receipts[mark.entry_id].experiment)
        cause = Cause.EXPERIMENT if experiment else Cause.DELIBERATE
        known = mark.from_launch is not None and mark.from_step >= mark.to_step
        last = mark.from_step if known else None
        yield _lost(cause, mark.from_launch, mark.to_step, last, step_seconds.get(mark.from_launch or 0, {}), mark.entry_id)
        after_rollback.add(_next_launch(entries, mark.entry_id))
    starts = {entry.launch: entry.id for entry, _ in events_of(entries, LaunchStart)}
    trained = [one for one in lineage.launches if one.last_step is not None and one.last_step > max(0, one.start_step or 0)]
    for before, after in pairwise(trained):  # a launch that was refused, and took no step, repeated none
        start, last = after.start_step, before.last_step
        between = range(before.number + 1, after.number + 1)
        if any(number in after_rollback for number in between) or start is None or last is None or start >= last:
            continue
        cause = causes.get(before.number, Cause.CRASH)
        seconds = step_seconds.get(before.number, {})
        yield _lost(cause, before.number, max(0, start), last, seconds, starts.get(after.number, ""))


def _next_launch(entries: Sequence[Entry], entry_id: str) -> int | None:
    """The first launch that started after this entry."""
    position = next(index for index, entry in enumerate(entries) if entry.id == entry_id)
    return next((entry.launch for entry in entries[position:] if entry.kind == EntryKind.LAUNCH_START), None)


def _lost(
    cause: Cause, launch: int | None, to_step: int, from_step: int | None, seconds: Mapping[int, float], entry_id: str
) -> LostWork:
    """The steps of one launch after `to_step` up to `from_step`, which is None where it is not known."""
    times = [seconds[step] for step in range(to_step + 1, (from_step or 0) + 1) if step in seconds]
    return LostWork(
        cause=cause,
        from_launch=launch,
        from_step=from_step,
        to_step=to_step,
        steps=None if from_step is None else from_step - to_step,
        seconds=sum(times) if times else None,
        entry=entry_id,
    )


def _lost_in_attempts(
    entries: Sequence[Entry], series: Series, attempts: Attempts
) -> Iterable[LostWork]:
    """Steps done again because the launcher started its ranks again within a launch, below the last logged step."""
    ends = {(entry.launch, event.attempt): (entry.id, event.cause) for entry, event in events_of(entries, LaunchAttempt)}
    resumed = {
        (entry.launch, event.attempt): entry.step
        for entry, event in events_of(entries, GuardVerdict)
        if event.attempt is not None and event.moment in ("", FIRST_STEP)
    }
    for number, whose in attempts.items():
        points = series.get(number, ())
        places = [0, *(place for place in range(1, len(whose)) if whose[place] != whose[place - 1]), len(whose)]
        for first, place, end in zip(places, places[1:], places[2:], strict=False):
            before, after = points[first:place], points[place:end]
            spacing = after[1][0] - after[0][0] if len(after) > 1 else 1
            said = resumed.get((number, whose[place]))
            last = max(step for step, _ in before)
            start = after[0][0] - max(1, spacing) if said is None else said
            if start >= last:
                continue  # it went on where the attempt before it was
            entry_id, said_cause = ends.get((number, whose[place - 1] + 1)) or ends.get((number, whose[place])) or ("", "")
            cause = END_CAUSES.get(said_cause, Cause.CRASH) if entry_id else Cause.UNKNOWN
            yield _lost(cause, number, start, last, _seconds_by_step(points[:place], whose[:place]), entry_id)


def _unverified(entries: Sequence[Entry], lineage: Lineage) -> int:
    """Number of resumed launches that no guard verdict passed."""
    passed = {entry.launch for entry, verdict in events_of(entries, GuardVerdict) if verdict.verdict == "passed"}
    return sum(1 for one in lineage.launches if (one.start_step or 0) > 0 and one.number not in passed)


def _wall(
    entries: Sequence[Entry], series: Series, now: float | None
) -> float | None:
    starts = [seconds_of(entry.ts) for entry, _ in events_of(entries, LaunchStart)]
    if not starts:
        return None
    ends = [seconds_of(entry.ts) for entry in entries if entry.kind in ENDS]
    ends += [points[-1][1] for points in series.values() if points]
    ends += [now] if now is not None else []
    return max(ends) - min(starts) if ends else None


def _sum(values: Iterable[Any]) -> Any:
    """The sum; None when a part is unknown."""
    listed = list(values)
    return None if None in listed else sum(listed)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
