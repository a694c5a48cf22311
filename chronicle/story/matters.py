"""What is not finished: incidents without an outcome, interventions nobody has judged, resumes nobody has verified,
a transaction that was begun and not ended, a proposal that waits. Pure over entries.

An incident is one matter however often its entry is repeated: the detector writes it again as it develops (same launch,
same event number, or `refs` to the first).
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chronicle.journal import Entry, Lineage, RollbackMark

__all__ = [
    "Intervention",
    "Matter",
    "Proposed",
    "answer_matters",
    "collect_interventions",
    "collect_matters",
    "latest_proposal",
    "open_intent",
]

RECOVERED = frozenset(("recovered", "closed"))
OUTCOMES_DONE = frozenset(("worked", "failed", "partly", "interrupted", "inconclusive", "superseded"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Matter:
    """An incident and what came of it; `open` until it recovers by itself, a rollback answers it, or someone closes it."""

    entry: Entry  # its newest form
    first_id: str
    ids: tuple[str, ...]
    outcome: str | None = None
    outcome_text: str = ""
    status: str = "open"
    answer: RollbackMark | None = None  # the rollback that took the run back to before it

    @property
    def open(self) -> bool:
        """Whether it still asks for an outcome."""
        return self.outcome is None and self.answer is None and self.status not in RECOVERED

    @property
    def onset(self) -> int | None:
        """The step where it began."""
        step = event_of(self.entry).get("onset_step", self.entry.step)
        return step if isinstance(step, int) else None

    @property
    def standing(self) -> str:
        """What came of it, in a few words."""
        if self.outcome is not None or self.answer is None or self.status in RECOVERED:
            return self.outcome or self.status
        return f"answered by the rollback to {self.answer.to_step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervention:
    """An applied rollback and its outcome, if anyone has said."""

    entry: Entry
    undone: bool = False
    outcome: str | None = None
    outcome_text: str = ""

    @property
    def open(self) -> bool:
        """Whether its outcome is still to be told."""
        return self.outcome is None and not self.undone and not self.entry.data.get("imported")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """The proposal that still stands, and the command that carries it out."""

    entry: Entry
    target_step: int | None
    lr_scale: float | None
    command: str


def event_of(entry: Entry) -> Mapping[str, Any]:
    """What the detector said: `data` itself, or `data.event`."""
    event = entry.data.get("event")
    return event if isinstance(event, Mapping) else entry.data


def collect_matters(entries: Iterable[Entry]) -> tuple[Matter, ...]:
    """All incidents in the order in which they were first seen."""
    found: dict[object, Matter] = {}
    key_of: dict[str, object] = {}
    for entry in entries:
        if entry.kind == "incident":
            key = next((key_of[ref] for ref in entry.refs if ref in key_of), None) or _key(entry)
            known = found.get(key)
            key_of[entry.id] = key
            found[key] = _renewed(known, entry)
        elif entry.kind == "close":
            for ref in entry.refs:
                if ref in key_of:
                    matter = found[key_of[ref]]
                    found[key_of[ref]] = replace(matter, outcome=_outcome(entry), outcome_text=_words(entry))
    return tuple(found.values())


def answer_matters(matters: Iterable[Matter], lineage: Lineage) -> tuple[Matter, ...]:
    """The same incidents; one whose onset lies on steps that a later rollback abandoned is answered by that rollback.

    An undone rollback is none. A restart that is no rollback answers nothing: nobody has said that it should.
    """
    marks = sorted(lineage.rollbacks, key=lambda mark: mark.entry_id)
    ids = [mark.entry_id for mark in marks]
    return tuple(replace(m, answer=_answer(m, lineage, marks[bisect_right(ids, m.first_id) :])) for m in matters)


def _answer(matter: Matter, lineage: Lineage, later: Sequence[RollbackMark]) -> RollbackMark | None:
    onset, launch = matter.onset, matter.entry.launch
    if onset is None or (launch is not None and lineage.contains(launch, onset)):
        return None
    return next((mark for mark in later if mark.to_step < onset <= mark.from_step), None)


def _key(entry: Entry) -> object:
    number = event_of(entry).get("id")
    return (entry.launch, number) if isinstance(number, int) else entry.id


def _renewed(known: Matter | None, entry: Entry) -> Matter:
    status = str(event_of(entry).get("status") or "open")
    outcome = entry.data.get("outcome")
    told = outcome.get("status") if isinstance(outcome, Mapping) else None
    text = str(outcome.get("text") or "") if isinstance(outcome, Mapping) else ""
    told = told if told in OUTCOMES_DONE else None
    if known is None:
        ids: tuple[str, ...] = (entry.id,)
        return Matter(entry=entry, first_id=entry.id, ids=ids, status=status, outcome=told, outcome_text=text)
    ids = (*known.ids, entry.id)
    return replace(known, entry=entry, ids=ids, status=status, outcome=told or known.outcome)


def collect_interventions(entries: Iterable[Entry]) -> tuple[Intervention, ...]:
    """All applied rollbacks, oldest first."""
    found: dict[str, Intervention] = {}
    for entry in entries:
        if entry.kind == "rollback.receipt":
            found[entry.id] = Intervention(entry=entry)
        for ref in entry.refs:
            if ref not in found:
                continue
            if entry.kind == "undo.receipt":
                found[ref] = replace(found[ref], undone=True)
            elif entry.kind == "close":
                found[ref] = replace(found[ref], outcome=_outcome(entry), outcome_text=_words(entry))
    return tuple(found.values())


def _outcome(entry: Entry) -> str:
    return str(entry.data.get("outcome") or "closed")


def _words(entry: Entry) -> str:
    return str(entry.data.get("text") or entry.title)


def open_intent(entries: Iterable[Entry]) -> Entry | None:
    """The intent that has neither receipt nor recovery; a run in this state neither starts nor resumes."""
    waiting: dict[str, Entry] = {}
    for entry in entries:
        if entry.kind in ("rollback.intent", "undo.intent"):
            waiting[entry.id] = entry
        elif entry.kind in ("rollback.receipt", "undo.receipt", "recover.receipt"):
            for ref in entry.refs:
                waiting.pop(ref, None)
    return next(reversed(waiting.values()), None)


def latest_proposal(entries: Iterable[Entry]) -> Proposed | None:
    """The newest proposal that no rollback, close or withdrawal has overtaken."""
    standing: Entry | None = None
    for entry in entries:
        if entry.kind == "proposal":
            standing = None if entry.data.get("withdrawn") else entry
        elif entry.kind == "rollback.receipt" or (entry.kind == "close" and standing and _concerns(entry, standing)):
            standing = None
    if standing is None:
        return None
    data = standing.data
    step, scale = data.get("target_step", standing.step), data.get("lr_scale")
    command = data.get("command") or _command(step, scale)
    return Proposed(
        entry=standing,
        target_step=step if isinstance(step, int) else None,
        lr_scale=float(scale) if isinstance(scale, int | float) else None,
        command=str(command),
    )


def _concerns(close: Entry, proposal: Entry) -> bool:
    return bool(set(close.refs) & {proposal.id, *proposal.refs})


def _command(step: object, scale: object) -> str:
    words = f"chronicle rollback --to {step}" if isinstance(step, int) else "chronicle propose"
    return f"{words} --lr-scale {scale:g}" if isinstance(scale, int | float) and scale != 1 else words
