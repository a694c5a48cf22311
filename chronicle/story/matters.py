"""Open matters: incidents, rollbacks without an outcome, and the pending proposal. Computed from entries.

The detector writes an incident again as it develops (same launch and event number, or `refs` to the first entry); that is
one matter.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from chronicle.journal import Entry, Lineage, RollbackMark
from chronicle.journal.events import Close, EntryKind, Incident, Proposed, RollbackReceipt

MATTERS = frozenset((EntryKind.INCIDENT, EntryKind.CLOSE))
INTERVENTIONS = frozenset((EntryKind.ROLLBACK_RECEIPT, EntryKind.UNDO_RECEIPT, EntryKind.CLOSE))
PROPOSALS = frozenset((EntryKind.PROPOSAL, EntryKind.ROLLBACK_RECEIPT, EntryKind.CLOSE))
RECOVERED = frozenset(("recovered", "closed"))
KINDS = {  # a kind of the detector and of the guard -> words, with the place of the channels
    "instant-spike": "Spike of {}",
    "gradual-divergence": "Divergence of {}",
    "level-shift": "Higher level of {}",
    "level-drop": "Lower level of {}",
    "resume-bump": "Bump of {} after a resume",
    "resume-drop": "Drop of {} after a resume",
    "restart-rewind": "Steps taken again after a restart: {}",
    "reinit": "Loss of an untrained model: {}",
    "nan": "Not a number: {}",
    "lr-bug": "Wrong LR: {}",
    "lr-mismatch": "Another LR than expected: {}",
    "interleaved-writers": "Two launches write one log: {}",
    "mix-shift": "Another mix of data: {}",
    "data-order": "Data in another order: {}",
    "too-good": "{} falls too fast",
    "plateau": "Plateau of {}",
    "weights-not-finite": "Weights that are not finite: {}",
    "replicas-differ": "Replicas that differ: {}",
    "save-differs": "A save that does not hold the weights of memory: {}",
    "step-differs": "The same step computed twice, with another result: {}",
    "stands-still": "{} stands still",
    "loss-missing": "{} is missing from its lines",
    "steps-skipped": "All steps are skipped: {}",
}
STANDINGS = {"partial": "recovered in part", "recovered": "recovered by itself"}
TIERS = {"propose": "a rollback is advised", "warn": "warning", "notice": "notice"}
OUTCOMES_DONE = frozenset(("worked", "failed", "partly", "interrupted", "inconclusive", "superseded"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Matter:
    """An incident and its outcome. Open until it recovers by itself, a rollback answers it, or a person closes it."""

    entry: Entry  # its newest form
    first_id: str
    ids: tuple[str, ...]
    outcome: str | None = None
    outcome_text: str = ""
    status: str = "open"
    answer: RollbackMark | None = None  # the rollback that took the run back to before it

    @property
    def open(self) -> bool:
        """Whether it has no outcome yet."""
        return self.outcome is None and self.answer is None and self.status not in RECOVERED

    @property
    def onset(self) -> int | None:
        """The step at which it began."""
        onset = event_of(self.entry).onset_step
        return self.entry.step if onset is None else onset

    @property
    def standing(self) -> str:
        """Its outcome in a few words."""
        if self.outcome is not None or self.answer is None or self.status in RECOVERED:
            return self.outcome or self.status
        return f"answered by the rollback to {self.answer.to_step}"

    @property
    def words(self) -> str:
        """How serious it is and how it stands: `warning · recovered by itself`."""
        event = event_of(self.entry)
        parts = (TIERS.get(event.tier, event.tier), STANDINGS.get(self.standing, self.standing))
        return " · ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervention:
    """An applied rollback and its outcome, if a person recorded one."""

    entry: Entry
    undone: bool = False
    outcome: str | None = None
    outcome_text: str = ""

    @property
    def open(self) -> bool:
        """Whether its outcome is not recorded yet."""
        return self.outcome is None and not self.undone and not RollbackReceipt.of(self.entry).imported


class OpenProposal(NamedTuple):
    """The proposal that waits for a decision, and the command that applies it."""

    entry: Entry
    target_step: int | None
    lr_scale: float | None
    command: str


def event_of(entry: Entry) -> Incident:
    """What the detector recorded in an incident."""
    return Incident.of(entry)


def incident_title(entry: Entry) -> str:
    """What happened and since which step, in words where the detector wrote its own title: `Spike of loss from step 120`."""
    event = event_of(entry)
    title = entry.title.removeprefix(f"{event.tier}: ")
    if not title.startswith(f"{event.kind} on ") or event.kind not in KINDS or event.onset_step is None:
        return title
    first, more = event.channels[:1], len(event.channels) - 1
    what = "".join(first) + (f" and {more} more" if more > 0 else "") or "the log"
    return f"{KINDS[event.kind].format(what)} from step {event.onset_step:,}"


def incident_detail(entry: Entry) -> str:
    """What the detector saw beside it: the first line of its evidence, or nothing."""
    seen = entry.data.get("evidence")
    first = seen[0] if isinstance(seen, Sequence) and not isinstance(seen, str) and seen else ""
    return first if isinstance(first, str) else ""


def collect_matters(entries: Iterable[Entry]) -> tuple[Matter, ...]:
    """All incidents in the order in which they were first seen."""
    found: dict[object, Matter] = {}
    key_of: dict[str, object] = {}
    for entry in entries:
        if entry.kind not in MATTERS:
            continue
        if entry.kind == EntryKind.INCIDENT:
            key = next((key_of[ref] for ref in entry.refs if ref in key_of), None) or _key(entry)
            known = found.get(key)
            key_of[entry.id] = key
            found[key] = _renewed(known, entry)
            continue
        outcome, text = _closed(entry)
        for ref in entry.refs:
            if ref in key_of:
                found[key_of[ref]] = replace(found[key_of[ref]], outcome=outcome, outcome_text=text)
    return tuple(found.values())


def answer_matters(matters: Iterable[Matter], lineage: Lineage) -> tuple[Matter, ...]:
    """The incidents, each with the later rollback that abandoned the steps of its onset.

    A rollback that was undone does not count, nor does a restart without a rollback.
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
    number = event_of(entry).id
    return entry.id if number is None else (entry.launch, number)


def _renewed(known: Matter | None, entry: Entry) -> Matter:
    status, outcome = event_of(entry).status or "open", Incident.of(entry).outcome
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
        if entry.kind not in INTERVENTIONS:
            continue
        if entry.kind == EntryKind.ROLLBACK_RECEIPT:
            found[entry.id] = Intervention(entry=entry)
        for ref in entry.refs:
            if ref in found and entry.kind == EntryKind.UNDO_RECEIPT:
                found[ref] = replace(found[ref], undone=True)
            elif ref in found and entry.kind == EntryKind.CLOSE:
                outcome, text = _closed(entry)
                found[ref] = replace(found[ref], outcome=outcome, outcome_text=text)
    return tuple(found.values())


def _closed(entry: Entry) -> tuple[str, str]:
    """Outcome and words of a `close` entry."""
    close = Close.of(entry)
    return close.outcome or "closed", close.text or entry.title


def open_proposal(entries: Iterable[Entry]) -> OpenProposal | None:
    """The newest proposal, unless it was withdrawn or closed, or a rollback came after it."""
    newest: Entry | None = None
    for entry in entries:
        if entry.kind not in PROPOSALS:
            continue
        if entry.kind == EntryKind.PROPOSAL:
            newest = None if Proposed.of(entry).withdrawn else entry
        elif entry.kind == EntryKind.ROLLBACK_RECEIPT or (newest is not None and _concerns(entry, newest)):
            newest = None
    if newest is None:
        return None
    proposed = Proposed.of(newest)
    step = newest.step if proposed.target_step is None else proposed.target_step
    command = proposed.command or _command(step, proposed.lr_scale)
    return OpenProposal(entry=newest, target_step=step, lr_scale=proposed.lr_scale, command=command)


def _concerns(close: Entry, proposal: Entry) -> bool:
    return bool(set(close.refs) & {proposal.id, *proposal.refs})


def _command(step: int | None, scale: float | None) -> str:
    words = "chronicle watch --once" if step is None else f"chronicle rollback --to {step}"
    return words if scale is None or scale == 1 else f"{words} --lr-scale {scale:g}"
