"""The newest checkpoint that a launch can resume from: the one answer for `chronicle verify --newest`, restarts and trainers.

Newest is by the lineage, not by the number alone: a checkpoint of a side try, whose launch the present weights do not descend
from, is left out, and so are abandoned ones and those that carry the identity of another run. Of the rest, from the highest
step down, the first one counts that verification passes: names, structure and counters, or every byte. What was passed over is
returned with why. `set_aside` moves half-written newer ones, and nothing else, to the quarantine of `chronicle verify`, which
`chronicle undo` takes back.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from chronicle.checkpoints import (
    CheckpointVerdict,
    KnownStates,
    find_verdict,
    known_states,
    record_verdicts,
    stamp_or_none,
    with_launches,
)
from chronicle.journal import Entry, JournalWriter, compute_lineage
from chronicle.journal.events import EntryKind, Quarantined, RollbackReceipt, RunFork, events_of
from chronicle.journal.lineage import Lineage
from chronicle.journal.place import read_place
from chronicle.settings import Settings
from rollback.checkpoint.identity import read_state_digests
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import (
    list_checkpoints,
    list_unrecognised,
    open_checkpoint,
    say_unrecognised,
)
from rollback.checks.verify import verify_checkpoint
from rollback.disk import RemoteView
from rollback.disk.content import read_pointer
from rollback.errors import Finding, RollbackError, Severity
from rollback.plan.request import PointerEdit
from rollback.records import record_of
from rollback.transaction.apply import POINTER_NAMES
from rollback.transaction.cleanup import (
    StrayMove,
    apply_moves,
    point_elsewhere,
    quarantine_dir,
    refuse_mount_points,
)


class Why(Enum):
    """Why a newer checkpoint is not the latest one."""

    SIDE_TRY = "side try"  # whole, and of another line of descent
    OTHER_RUN = "other run"  # it says itself that another run saved it
    SPOILT = "spoilt"  # whole, and its weights are not (F11)
    UNSOUND = "unsound"  # files are missing, cut or changed
    UNREADABLE = "unreadable"  # the storage failed: nothing is known of it


class PassedOver(NamedTuple):
    """A newer checkpoint that is not the latest one, and why."""

    checkpoint: Checkpoint
    reason: str
    why: Why


class Latest(NamedTuple):
    """The newest whole checkpoint, or None; whether every byte was read; what was passed over, newest first, or is unknown."""

    checkpoint: Checkpoint | None
    verified: bool
    passed_over: tuple[PassedOver, ...]
    unrecognised: tuple[str, ...] = ()

    def words(self) -> str:
        """That something lies there which is not recognised, to be said before a start; "" for nothing."""
        return say_unrecognised(self.unrecognised)


def find_latest(root: Path, entries: Sequence[Entry], *, full: bool, settings: Settings | None = None) -> Latest:
    """The newest checkpoint below `root` that passes; with `full` every byte was read, now or earlier.

    With `settings` a verification that is made now is recorded in the journal. Raises `OSError` or `RollbackError` when the
    directory cannot be listed.
    """
    lineage, own, states = compute_lineage(entries), _own_ids(entries, settings), known_states(entries)
    listed = with_launches(list_checkpoints(root, include_abandoned=False), entries)
    beside = list_unrecognised(root, listed)
    left, made = rolled_back_in_store(root, entries)
    listed += [one for one in made if one.path not in {known.path for known in listed}]
    candidates = [one for one in listed if one.step is not None and one.abandoned is None]
    passed_over = []
    for one in sorted(candidates, key=lambda one: (one.step or 0, one.launch or 0), reverse=True):
        if other := _other_run(one, own, states, settings):
            passed_over.append(PassedOver(one, other, Why.OTHER_RUN))
            continue
        if one.path.name in left and stamp_or_none(one.path) == left[one.path.name]:
            words = "a rollback in the store went back before it, or made an edited copy of it"
            passed_over.append(PassedOver(one, words, Why.SIDE_TRY))
            continue
        if elsewhere := _side_try(one, lineage):
            passed_over.append(PassedOver(one, elsewhere, Why.SIDE_TRY))
            continue
        verdict = find_verdict(one.path, entries)
        reason, was_read, why = _judge(one, verdict, full=full, settings=settings)
        if not reason:
            return Latest(one, was_read, tuple(passed_over), beside)
        passed_over.append(PassedOver(one, reason, why))
    return Latest(None, False, tuple(passed_over), beside)


def _own_ids(entries: Sequence[Entry], settings: Settings | None) -> frozenset[str] | None:
    """Ids of this run and of those it was declared to descend from; None where its own is not known."""
    place = None if settings is None else read_place(settings.paths)
    if place is None:
        return None if settings is None or entries else frozenset()
    return frozenset({place.run_id, *(str(fork.parent.get("run_id")) for _, fork in events_of(entries, RunFork))})


def _other_run(one: Checkpoint, own: frozenset[str] | None, states: KnownStates, settings: Settings | None) -> str:
    """That another run saved it, where the checkpoint or a run beside this one says so; "" where neither does."""
    try:
        found = {} if own is None else states.identity_in(one)
        if not found and own is not None and settings is not None:
            found = _recorded_beside(one, settings.paths.run_dir.parent)
    except (RollbackError, OSError, ValueError):
        return ""  # verification says what is wrong with it
    if not found.get("run_id") or own is None or found["run_id"] in own:
        return ""
    return f"run `{found.get('run') or found['run_id']}` saved it; for a fork on purpose: `chronicle init --from CHECKPOINT`"


def _recorded_beside(one: Checkpoint, logs_dir: Path) -> Mapping[str, Any]:
    """The identity of a checkpoint whose content the guard of some run in this directory has recorded; empty for none."""
    for digest in read_state_digests(one):
        for path in sorted(logs_dir.glob(f"*/states/{digest}.*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            identity = record.get("identity") if isinstance(record, dict) else None
            if isinstance(identity, dict):
                return identity
    return {}


def _side_try(one: Checkpoint, lineage: Lineage) -> str:
    """Why the present weights do not descend from it; "" where they do, or where that is not known."""
    step, stepped = one.step or 0, {span.number for span in lineage.launches if span.has_steps}
    if one.launch not in stepped or not lineage.kept or lineage.contains(one.launch, step):
        return ""
    if one.launch == lineage.head_launch and step > lineage.head_step:
        return ""  # saved after the last logged step
    owner = lineage.owner(step)
    if owner is None:
        return f"launch {one.launch} saved it, and the run is at step {lineage.head_step} of launch {lineage.head_launch}"
    return f"launch {one.launch} saved it, and step {step} of the run is that of launch {owner}"


def rolled_back_in_store(root: Path, entries: Sequence[Entry]) -> tuple[Mapping[str, str], list[Checkpoint]]:
    """Checkpoints that the rollbacks in a store left where they are (name -> stamp), and the ones that they made.

    A store moves nothing away, so its readers are told by the journal. One that was saved again has another stamp.
    """
    if RemoteView.opened is None:
        return {}, []
    from rollback.disk.remote import local_path, shown  # only where the checkpoints are in a store
    from rollback.transaction.in_store import left_and_made

    undone = {ref for entry in entries if entry.kind == EntryKind.UNDO_RECEIPT for ref in entry.refs}
    receipts = [receipt for entry, receipt in events_of(entries, RollbackReceipt) if entry.id not in undone]
    here = [receipt for receipt in receipts if receipt.store and receipt.root == shown(str(root))]
    left, made = left_and_made([(receipt.step or 0, receipt.store) for receipt in here])
    return left, [open_checkpoint(local_path(url)) for url in made]


def _judge(
    one: Checkpoint, verdict: CheckpointVerdict | None, *, full: bool, settings: Settings | None
) -> tuple[str, bool, Why]:
    """(why it does not count, "" if it does; whether every byte was read; what kind of reason)."""
    if verdict is not None and not verdict.passes:
        check, path, message = verdict.errors[0] if verdict.errors else ("", "", "see `chronicle verify`")
        return f"{check} {path}: {message}", verdict.full, _kind(error[0] for error in verdict.errors)
    if verdict is not None and verdict.sound:
        return "", True, Why.UNSOUND
    stamp = stamp_or_none(one.path)
    try:
        findings = verify_checkpoint(one, full=full)
    except OSError as problem:
        return f"it cannot be read: {problem}", False, Why.UNREADABLE
    except RollbackError as problem:
        return f"it cannot be read: {problem}", False, Why.UNSOUND
    if full and settings is not None:
        record_verdicts(settings, [(one, stamp, findings)], full=True)
    errors = list(_errors(findings))
    reason = f"{errors[0].check} {errors[0].path}: {errors[0].message}" if errors else ""
    return reason, full, _kind(error.check for error in errors)


def _kind(checks: Iterable[str]) -> Why:
    """Weights that are spoilt and otherwise whole are no half-written save."""
    found = set(checks)
    return Why.SPOILT if found == {"F11"} else Why.UNSOUND


def _errors(findings: Sequence[Finding]) -> Iterator[Finding]:
    return (finding for finding in findings if finding.severity is Severity.ERROR)


# --- half-written newer ones


def set_aside(root: Path, names: Sequence[str], newest: Checkpoint | None, writer: JournalWriter, *, why: str) -> Entry | None:
    """Move these entries of `root` into quarantine, after an entry in the journal; None where there is nothing to move.

    A pointer of the layout (`latest`, `latest_checkpointed_iteration.txt`, a link) that names one of them names `newest`
    afterwards. Raises `RollbackError` or `OSError` where it cannot be done: the part that was moved stays moved and recorded.
    """
    moves = tuple(StrayMove(path=name, inode=os.lstat(root / name).st_ino) for name in sorted(names))
    if not moves:
        return None
    refuse_mount_points(root)
    pointers = tuple(pointers_to(root, set(names), newest))
    event = Quarantined(
        root=str(root),
        moves=tuple(move.to_json() for move in moves),
        pointers=tuple(record_of(pointer) for pointer in pointers),
    )
    shown = ", ".join(move.path for move in moves)
    entry = writer.write(event, title=f"set aside, {why}: {shown}")
    apply_moves(root, quarantine_dir(root, entry.id), moves)
    point_elsewhere(root, pointers)
    return entry


def pointers_to(root: Path, gone: set[str], newest: Checkpoint | None) -> Iterator[PointerEdit]:
    """The pointers below `root` that name one of these entries, with what they say when they name `newest`."""
    if newest is None:
        return
    for name in sorted({*POINTER_NAMES, *(path.name for path in root.iterdir() if path.is_symlink())} - gone):
        text = read_pointer(root / name)
        if text is None:
            continue
        word = text.strip()
        named = {word, Path(word).name, *(one for one in gone if word.isdigit() and re.search(rf"(?<!\d)0*{word}$", one))}
        if named & gone:
            to = _number_of(newest) if word.isdigit() and word not in gone else newest.path.name
            yield PointerEdit(path=name, before=text, after=text.replace(word, to), is_link=(root / name).is_symlink())


def _number_of(newest: Checkpoint) -> str:
    """The number at the end of its name, by which such a pointer was found (`batch-70` may be of step 35); else its step."""
    found = re.search(r"(\d+)$", newest.path.name)
    return str(newest.step) if found is None else str(int(found[1]))
