"""Event-level scoring: which labels were seen and how fast, what was alarmed without reason, what was proposed.

An alarm matches a label when it falls into [onset - 6, onset + reach] (Tatbul et al. 2018): reach is the label's peak
or ten points for instant spikes, 300 points else. An alarm anywhere inside a labelled event or a dont-care zone is no
false alarm. Healthy points are those outside both.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.detector.curves import Curve, Label
from rollback.detect import Detector, Event, Tier
from rollback.propose import CandidateCheckpoint, History, Proposal, propose

EARLY, AFTER, REACH = 6, 30, 300
MERGE_ROWS = 300
HISTORY_POINTS = 32
SAME_INTERVAL = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """What a detector said, reduced to what every detector can say."""

    row: int
    end_row: int | None
    tier: Tier
    event: Event | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One label and the alarm that saw it, if any."""

    curve: Curve
    label: Label
    alarm: Alarm | None
    has_history: bool


@dataclass(slots=True)
class Score:
    """Results over a set of curves."""

    found: list[Found] = field(default_factory=list)
    false_alarms: list[tuple[Curve, Alarm]] = field(default_factory=list)
    healthy_points: int = 0
    points: int = 0
    channel_points: int = 0
    cpu_seconds: float = 0.0
    proposals: list[tuple[Curve, Proposal]] = field(default_factory=list)

    def select(self, *, major: bool | None = None, kinds: Sequence[str] = (), history: bool = False) -> list[Found]:
        return [
            item for item in self.found
            if (major is None or item.label.major is major) and (not kinds or item.label.kind in kinds)
            and (item.has_history or not history)
        ]  # fmt: skip

    def false_count(self, *tiers: Tier) -> int:
        return sum(not tiers or alarm.tier in tiers for _, alarm in self.false_alarms)


def run_detector(curve: Curve, score: Score) -> list[Alarm]:
    """Fold the curve; also keeps time and the proposal made from the checkpoints that the curve comes with."""
    detector = Detector()
    begin = time.process_time()
    for step, values, launch in zip(curve.steps, curve.values, curve.launches, strict=True):
        detector.feed(step, values, launch=launch)
    detector.finish()
    score.cpu_seconds += time.process_time() - begin
    score.channel_points += sum(len(values) for values in curve.values)
    events = detector.events
    if any(event.tier is Tier.PROPOSE for event in events):
        candidates = [CandidateCheckpoint(step=step, verified=True) for step in curve.checkpoints]
        proposal = propose(events, candidates, History(last_step=curve.steps[-1]))
        if proposal is not None:
            score.proposals.append((curve, proposal))
    return [
        Alarm(row=event.alarm_row, end_row=event.recovered_row, tier=event.tier, event=event) for event in events
    ]


def merge_rows(rows: Iterable[int]) -> list[Alarm]:
    """Alarms of a rule that has no events: those at most 300 points apart are one."""
    alarms: list[Alarm] = []
    first = last = None
    for row in rows:
        if last is None or first is None or row - last > MERGE_ROWS:
            if first is not None:
                alarms.append(Alarm(row=first, end_row=last, tier=Tier.NOTICE))
            first = row
        last = row
    if first is not None:
        alarms.append(Alarm(row=first, end_row=last, tier=Tier.NOTICE))
    return alarms


def spread_rows(rows: Iterable[int]) -> list[Alarm]:
    """Every alarm row by itself: for matching, a rule must not lose a second spike to the first one's tail."""
    return [Alarm(row=row, end_row=row, tier=Tier.NOTICE) for row in rows]


def score_curve(curve: Curve, alarms: Sequence[Alarm], score: Score, *, matching: Sequence[Alarm] | None = None) -> None:
    """Add one curve to the score; `matching` are the alarms to match with when they differ from those counted."""
    for label in curve.labels:
        alarm = next((a for a in matching or alarms if sees(a, label)), None)
        score.found.append(Found(curve=curve, label=label, alarm=alarm, has_history=_has_history(curve, label)))
    blank = _blank_rows(curve)
    score.healthy_points += len(curve.steps) - sum(blank)
    score.points += len(curve.steps)
    for alarm in alarms:
        onset = alarm.event.onset_row if alarm.event is not None else None
        if not blank[alarm.row] and not (onset is not None and blank[onset]):
            score.false_alarms.append((curve, alarm))


def sees(alarm: Alarm, label: Label) -> bool:
    if label.kind == "lr-bug":
        reaches = alarm.end_row is None or alarm.end_row >= label.onset_row - EARLY
        return alarm.tier is not Tier.NOTICE and alarm.row <= label.onset_row + REACH and reaches
    reach = REACH
    if label.kind == "instant-spike":
        reach = max(10, (label.peak_row or 0) - label.onset_row)
    return label.onset_row - EARLY <= alarm.row <= label.onset_row + reach


def _has_history(curve: Curve, label: Label) -> bool:
    """At least 32 points logged at the interval of the onset stand before it."""
    row, steps = label.onset_row, curve.steps
    if row < HISTORY_POINTS:
        return False
    gaps = [b - a for a, b in zip(steps[row - HISTORY_POINTS : row], steps[row - HISTORY_POINTS + 1 : row + 1], strict=True)]
    positive = sorted(gap for gap in gaps if gap > 0)
    return not positive or positive[-1] <= SAME_INTERVAL * max(1, positive[len(positive) // 2])


def _blank_rows(curve: Curve) -> list[bool]:
    """Rows that count neither way: inside labelled events and dont-care zones."""
    blank = [any(low <= step <= high for low, high in curve.dont_care) for step in curve.steps]
    for label in curve.labels:
        end = len(blank) if label.end_row is None else min(len(blank), label.end_row + AFTER)
        for row in range(max(0, label.onset_row - EARLY - 2), end):
            blank[row] = True
    return blank
