"""Breaches that the guard found in a run and wrote to the journal, as events: they call for a rollback like the detector's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from chronicle.journal.entries import Entry
from chronicle.journal.events import EntryKind, Incident
from chronicle.journal.lineage import Lineage
from chronicle.story.matters import answer_matters, collect_matters
from rollback.detect import Event, Kind, Status, Tier

__all__ = ["breach_events", "is_breach"]

GUARD = "guard"  # the channel of the guard's own incidents
SPOILT = frozenset((Kind.POISONED, Kind.REPLICAS))


def is_breach(entry: Entry) -> bool:
    """Whether the guard wrote this incident because the weights are spoilt."""
    if entry.kind != EntryKind.INCIDENT:
        return False
    incident = Incident.of(entry)
    return incident.channels == (GUARD,) and incident.kind in SPOILT and incident.onset_step is not None


def breach_events(entries: Sequence[Entry], lineage: Lineage | None, *, after: Iterable[Event] = ()) -> list[Event]:
    """The breaches that no rollback has answered yet, numbered behind the events `after`; each is a cluster of its own."""
    matters = collect_matters(entry for entry in entries if is_breach(entry) or entry.kind == EntryKind.CLOSE)
    standing = answer_matters(matters, lineage) if lineage is not None else matters
    known = tuple(after)
    number = 1 + max((event.id for event in known), default=-1)
    cluster = 1 + max((event.cluster for event in known), default=-1)
    return [
        _event(matter.entry, number + place, cluster + place) for place, matter in enumerate(m for m in standing if m.open)
    ]


def _event(entry: Entry, number: int, cluster: int) -> Event:
    incident = Incident.of(entry)
    onset: Any = incident.onset_step
    low = onset if incident.onset_low_step is None else incident.onset_low_step
    return Event(
        id=number, kind=Kind(incident.kind), tier=Tier.PROPOSE, status=Status.OPEN,
        onset_step=onset, onset_low_step=low, onset_row=None, onset_low_row=None,
        alarm_step=onset if incident.alarm_step is None else incident.alarm_step, alarm_row=0,
        channels=(GUARD,), cluster=cluster, launch=entry.launch, evidence=(incident.text,) if incident.text else (),
    )  # fmt: skip
