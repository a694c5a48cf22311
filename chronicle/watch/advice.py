"""What a proposal needs from the journal and the disk, and the proposal as a journal entry and one printed line.

Checkpoints are read, never changed. Only the newest few before the onset are verified: reading a hundred checkpoints of
160 GB to propose one would take longer than the proposal saves.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chronicle.checkpoints import find_checkpoint_roots, find_verdict, launch_evidence
from chronicle.journal.entries import Entry
from chronicle.journal.events import (
    GUARDED_SAVES,
    CheckpointSaved,
    EntryKind,
    Hardware,
    Incident,
    Note,
    Proposed,
    RollbackReceipt,
    events_of,
)
from chronicle.journal.lineage import Lineage, compute_lineage
from chronicle.journal.lr_ledger import LrLedger, compute_lr_ledger
from chronicle.journal.reader import read_journal
from chronicle.journal.writer import JournalWriter
from chronicle.metrics.log import Point
from chronicle.paths import RunPaths
from chronicle.story.matters import answer_matters, collect_matters
from rollback.detect import Event, Kind, Status, Tier
from rollback.errors import RollbackError, Severity

if TYPE_CHECKING:  # imported where something is to be proposed: most launches need none of it
    from rollback.checkpoint.layout import Checkpoint
    from rollback.propose import Action, CandidateCheckpoint, History, PastRollback, Proposal

VERIFIED_AT_MOST = 6
RECENT_POINTS = 64  # over which the seconds per step are measured
GUARD = "guard"  # the channel of the guard's own incidents
SPOILT = frozenset((Kind.POISONED, Kind.REPLICAS))
OF_THE_LOSS = frozenset((Kind.INSTANT_SPIKE, Kind.GRADUAL_DIVERGENCE, Kind.NAN))
SOON = 100  # logged points: trouble of the loss that calls for no rollback and is so near a breach led to it
ONSETS = frozenset((EntryKind.PROPOSAL, EntryKind.INCIDENT))  # entries that name an onset


class Adviser:
    """Makes the proposals of one launch; reads journal and disk only when something is to be proposed."""

    def __init__(
        self, paths: RunPaths, launch: int, writer: JournalWriter, checkpoints_dir: Path | None, options: tuple[str, ...] = ()
    ) -> None:
        """`options`: what the proposed command needs to find the same run and checkpoints."""
        self._options = options
        self.paths, self.launch = paths, launch
        self._writer, self._checkpoints_dir = writer, checkpoints_dir
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_POINTS)
        self._last_step = 0
        self._lr_expected: float | None = None
        self._said: set[tuple[int | None, str | None]] = set()
        self.proposal: Proposal | None = None

    def remember(self, entries: Iterable[Entry]) -> None:
        """Take what these entries propose as said."""
        self._said |= {(told.target_step, told.command) for _, told in events_of(entries, Proposed)}

    def note(self, point: Point, lr_expected: float | None = None) -> None:
        """Remember the newest point, and the LR that was promised for it."""
        self._last_step = point.step
        self._lr_expected = lr_expected if lr_expected is not None else self._lr_expected
        if point.time is not None:
            self._recent.append((point.step, point.time))

    def advise(self, events: Sequence[Event], trigger: Event) -> str | None:
        """Make the proposal, write it to the journal, return its line; None when none is due or it was made before."""
        proposal = propose_of_run(
            self.paths, events, self._checkpoints_dir, last_step=self._last_step, launch=self.launch,
            before=self._last_step if trigger.onset_low_step is None else trigger.onset_low_step,
            seconds_per_step=self._seconds_per_step(), options=self._options, lr_expected=self._lr_expected,
        )  # fmt: skip
        if proposal is None or (proposal.target_step, proposal.command) in self._said:
            return None
        self._said.add((proposal.target_step, proposal.command))
        self.proposal = proposal
        self._writer.write(
            Proposed.from_json(proposal.to_json()), step=proposal.target_step, launch=self.launch, title=self.title(proposal)
        )
        return self.phrase(proposal)

    def _seconds_per_step(self) -> float | None:
        if len(self._recent) < 2:
            return None
        (first_step, begin), (last_step, end) = self._recent[0], self._recent[-1]
        return (end - begin) / (last_step - first_step) if last_step > first_step and end > begin else None

    @staticmethod
    def title(proposal: Proposal) -> str:
        """Return the title of the journal entry."""
        if proposal.target_step is None:
            return "no verified checkpoint before the onset"
        who = " by hand" if proposal.by_hand else ""
        scale = f", LR ×{proposal.lr_scale:g}{who}" if proposal.lr_scale != 1.0 else ""
        return f"roll back to {proposal.target_step}{scale}"

    @staticmethod
    def phrase(proposal: Proposal) -> str:
        """Return what a person reads on stderr: the command, or why there is none."""
        if proposal.command is None:
            return f"no rollback proposed: {proposal.without_target or proposal.reasons[-1]}"
        cost = f" (discards {proposal.cost_steps} steps)" if proposal.cost_steps is not None else ""
        also = f"; and {proposal.by_hand}" if proposal.by_hand else ""
        return f"to roll back, type: {proposal.command}{cost}{also}"


# --- Checkpoints that can be a target


def propose_of_run(
    paths: RunPaths, events: Sequence[Event], checkpoints_dir: Path | None, *, last_step: int, before: int,
    launch: int | None = None, **known: Any,
) -> Proposal | None:  # fmt: skip
    """What the events of a run call for, with the checkpoints that it has on disk at or before the step `before`.

    `launch`: its last one where none is given; `known`: fields of the history that stand in no journal.
    """
    from rollback.propose import propose

    entries = read_journal(paths).entries
    if launch is None:
        launch = max((one.number for one in compute_lineage(entries).launches), default=None)
    history = replace(collect_history(entries, run=paths.run, launch=launch, last_step=last_step), **known)
    roots = find_checkpoint_roots(entries, checkpoints_dir, Path.cwd())
    return propose(events, collect_candidates(roots, before=before, entries=entries), history)


def collect_candidates(
    roots: Sequence[Path], *, before: int, entries: Sequence[Entry] = ()
) -> tuple[CandidateCheckpoint, ...]:
    """List the checkpoints that are not abandoned; verify the newest few at or before the step `before`.

    A checkpoint that `chronicle verify` found unsound, by `entries`, is not verified again.
    """
    from rollback.propose import CandidateCheckpoint

    found: dict[tuple[int, int | None], Checkpoint] = {}
    for root in roots:
        for checkpoint in _list(root):
            if checkpoint.step is not None and checkpoint.abandoned is None:
                found[checkpoint.step, checkpoint.launch] = checkpoint
    newest_first = sorted(found.values(), key=lambda c: c.step or 0, reverse=True)
    candidates, looked = [], 0
    for checkpoint in newest_first:
        step = checkpoint.step or 0
        verified = None
        if step <= before and looked < VERIFIED_AT_MOST:
            verified = _is_verified(checkpoint, entries)
            looked += verified
        saved = _save_of(checkpoint, entries)
        spoilt = saved is not None and bool(saved.spoilt)
        honours = None if saved is None else _honours_in(saved)
        elsewhere, one_lr = _lr_of(checkpoint, entries) if verified else ("", True)
        candidates.append(
            CandidateCheckpoint(
                step=step, launch=checkpoint.launch, verified=verified, healthy=not spoilt, honours=honours,
                lr_elsewhere=elsewhere, one_lr=one_lr,
            )
        )
    return tuple(reversed(candidates))


def _list(root: Path) -> Sequence[Checkpoint]:
    from rollback.checkpoint.listing import list_checkpoints  # only when something is to be proposed

    try:
        return list_checkpoints(root, include_abandoned=False)
    except (RollbackError, OSError):
        return ()  # no such directory yet, or no right to read it: nothing can be proposed from it


def _is_verified(checkpoint: Checkpoint, entries: Sequence[Entry]) -> bool:
    """Whether verification finds no error, now or when every byte was read; an unreadable one is not verified."""
    from rollback.checks.verify import verify_checkpoint

    verdict = find_verdict(checkpoint.path, entries)
    if verdict is not None and not verdict.passes:
        return False
    try:
        return all(finding.severity is not Severity.ERROR for finding in verify_checkpoint(checkpoint))
    except (RollbackError, OSError):
        return False


def _lr_of(checkpoint: Checkpoint, entries: Sequence[Entry]) -> tuple[str, bool]:
    """Why `chronicle rollback --lr-scale` would refuse this checkpoint, and whether `--lr` would take it.

    "" and yes where it would not, or where that is not known: the rollback says it.
    """
    from rollback.checkpoint.listing import read_state
    from rollback.checkpoint.manifest import read_manifest
    from rollback.plan.lr import has_one_lr, lr_elsewhere

    try:
        manifest = None if checkpoint.single_file else read_manifest(checkpoint.path)
        memory = None if manifest is None else manifest.memory
        state = read_state(checkpoint)
        elsewhere = lr_elsewhere(state, replace(launch_evidence(checkpoint, entries), memory=memory))
        return elsewhere, not state.optimizers or has_one_lr(state)
    except (RollbackError, OSError, ValueError, KeyError):
        return "", True


# --- History: earlier rollbacks, LR, hardware


def collect_history(entries: Sequence[Entry], *, run: str | None, launch: int | None, last_step: int) -> History:
    """Return what the policy needs to know of the run's past, from its journal."""
    from rollback.propose import History

    lineage = compute_lineage(entries)
    ledger = compute_lr_ledger(entries, lineage)
    rollbacks = tuple(_past_rollbacks(entries))
    factor, raised = _lr_factors(ledger, lineage, launch)
    return History(
        run=run, last_step=last_step, rollbacks=rollbacks,
        hardware=tuple((e.step, e.title) for e in entries if e.step is not None and _is_about_hardware(e)),
        lr_factor=factor, lr_raised=raised, honours=_latest_honours(entries),
        discarded_steps=_discarded(lineage), day=datetime.date.today().toordinal(),
    )  # fmt: skip


def _is_about_hardware(entry: Entry) -> bool:
    """Whether an entry is a hardware event that is not harmless, or a person's note with that tag."""
    if entry.kind == EntryKind.HARDWARE:
        return Hardware.of(entry).serious is not False
    return entry.kind == EntryKind.NOTE and "hardware" in Note.of(entry).tags


def _past_rollbacks(entries: Sequence[Entry]) -> Iterable[PastRollback]:
    """Yield each rollback with the onset it answered: that of the last proposal before it, else of the last incident."""
    from rollback.propose import Action, PastRollback

    undone = {ref for entry in entries if entry.kind == EntryKind.UNDO_RECEIPT for ref in entry.refs}
    onset, action = None, Action.SKIP
    for entry in entries:
        if entry.kind in ONSETS:
            proposed = Proposed.view(entry.data)
            onset = proposed.onset_step if proposed.onset_step is not None else onset
            if entry.kind == EntryKind.PROPOSAL and proposed.action in set(Action):
                action = Action(proposed.action)
        elif entry.kind == EntryKind.ROLLBACK_RECEIPT and entry.id not in undone and entry.step is not None:
            receipt = RollbackReceipt.of(entry)
            scale = 1.0 if receipt.lr_ratio is None else receipt.lr_ratio
            yield PastRollback(
                onset_step=entry.step if onset is None else onset, target_step=entry.step,
                action=_action_taken(action, scale), lr_scale=scale,
                day=datetime.datetime.fromisoformat(entry.ts).date().toordinal(),
            )  # fmt: skip
            onset, action = None, Action.SKIP


def _action_taken(proposed: Action, scale: float) -> Action:
    """Return the rung that was taken: the LR decides where a person did something else than proposed."""
    from rollback.propose import Action

    if scale <= 0.6:
        return Action.LR_50
    if scale < 1.0:
        return Action.LR_75
    return proposed if proposed.rung <= Action.SKIP.rung else Action.SKIP


def _lr_factors(ledger: LrLedger, lineage: Lineage, launch: int | None) -> tuple[float, float]:
    """Return the factor this launch trains at, and its ratio to the parent's."""
    line = ledger.line(launch)
    if line is None or line.factor is None:
        return 1.0, 1.0
    parents = {span.number: span.parent for span in lineage.launches}
    parent = ledger.line(parents.get(line.launch))
    if parent is None or not parent.factor:
        return line.factor, 1.0
    return line.factor, line.factor / parent.factor


def _latest_honours(entries: Sequence[Entry]) -> frozenset[str]:
    """Return the options that the run declared support for with its last checkpoint."""
    saves = (entry for entry in reversed(entries) if entry.kind in GUARDED_SAVES)
    return next((_honours_in(CheckpointSaved.view(entry.data)) for entry in saves), frozenset())


def _save_of(checkpoint: Checkpoint, entries: Sequence[Entry]) -> CheckpointSaved | None:
    """Return what the guard recorded when this checkpoint was saved; None where no save is on record."""
    name = checkpoint.path.name
    for entry in reversed(entries):
        if entry.kind in GUARDED_SAVES and entry.step == checkpoint.step:
            saved = CheckpointSaved.view(entry.data)
            path = Path(saved.path or name)
            if name in (path.name, path.parent.name):  # `opt_step-7/accelerator_state` is listed as `opt_step-7`
                return saved
    return None


def _honours_in(saved: CheckpointSaved) -> frozenset[str]:
    honours = saved.honours
    return frozenset(map(str, honours)) if isinstance(honours, list | tuple) else frozenset()


def _discarded(lineage: Lineage) -> int:
    return sum(
        span.last_step - span.abandoned_after for span in lineage.launches
        if span.abandoned_after is not None and span.last_step is not None
    )  # fmt: skip


# ---- breaches that the guard wrote to the journal: they call for a rollback like the detector's events -----------------


def is_breach(entry: Entry) -> bool:
    """Whether the guard wrote this incident because the weights are spoilt."""
    if entry.kind != EntryKind.INCIDENT:
        return False
    incident = Incident.of(entry)
    return incident.channels == (GUARD,) and incident.kind in SPOILT and incident.onset_step is not None


def breach_events(entries: Sequence[Entry], lineage: Lineage | None, *, after: Iterable[Event] = ()) -> list[Event]:
    """The breaches that no rollback has answered yet, numbered behind the events `after`.

    One that follows trouble of the loss is of its cluster: its first wrong step is known, and it is not where it began. A
    checkpoint between the two holds steps of that trouble. Any other one is a cluster of its own.
    """
    matters = collect_matters(entry for entry in entries if is_breach(entry) or entry.kind == EntryKind.CLOSE)
    standing = answer_matters(matters, lineage) if lineage is not None else matters
    known = tuple(after)
    number = 1 + max((event.id for event in known), default=-1)
    cluster = 1 + max((event.cluster for event in known), default=-1)
    found = []
    for place, matter in enumerate(m for m in standing if m.open):
        breach = _event(matter.entry, number + place, cluster + place)
        found.append(replace(breach, cluster=_led_to(known, breach)))
    return found


def _led_to(known: Sequence[Event], breach: Event) -> int:
    """The cluster of the trouble of the loss that came before a breach and has not recovered; its own where there is none."""
    calling = {event.cluster for event in known if event.tier is Tier.PROPOSE}
    first: Any = breach.onset_low_step
    for event in reversed(known):
        if event.kind not in OF_THE_LOSS or event.status is Status.RECOVERED or event.onset_step is None:
            continue
        before = first - event.onset_step
        if before > 0 and (event.cluster in calling or before <= SOON * max(1.0, event.interval)):
            return event.cluster
    return breach.cluster


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
