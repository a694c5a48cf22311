"""A run while somebody works on its checkpoints: its lock, its journal as read, and the entries of a transaction."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chronicle.checkpoints import is_by_stamp, known_states, stamp_or_none
from chronicle.errors import JournalError, Refusal
from chronicle.journal import Entry, Journal, JournalWriter, read_journal
from chronicle.journal.events import (
    EVENTS,
    INTENTS,
    RECEIPTS,
    EntryKind,
    RollbackReceipt,
    UndoReceipt,
    find_open_transaction,
    intents_closed_by,
)
from chronicle.journal.place import Anchors, Place, describe_parent, is_parents, look, refuse_copy
from chronicle.journal.reader import DAMAGED_HINT, damage_overridden, describe_damage, find_damage
from chronicle.launch.admission import LaunchRefused, ensure_startable
from chronicle.paths import RunPaths
from chronicle.settings import Settings, is_url
from chronicle.story.plain import say
from rollback.checkpoint.listing import open_checkpoint
from rollback.disk.durable import REAL_DISK
from rollback.disk.lock import hold_lock
from rollback.errors import IntentOpen, RollbackError, RunAlive
from rollback.transaction.protocol import remove_leftovers


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run while a command works on its checkpoints: its paths, its journal as read, and a writer."""

    settings: Settings
    paths: RunPaths
    root: Path  # of the checkpoints; the view of it where they are in an object store
    journal: Journal
    writer: JournalWriter
    force: str | None
    is_new: bool  # the journal did not exist before
    overrode: tuple[str, ...] = ()  # the damage of the journal that was known when a reason was given
    identity: Mapping[str, Any] = field(default_factory=dict)  # of the checkpoint that is worked on
    bucket: Any = None  # the object store, a `rollback.disk.remote.Bucket`

    @property
    def anchors(self) -> Anchors:
        """The directories that stored paths are relative to, as they lie now."""
        return self.writer.place.anchors(self.paths.run_dir)

    def find(self, wanted: object) -> Entry | None:
        """The entry of this id."""
        return next((entry for entry in self.journal.entries if entry.id == wanted), None)

    def contract_form(self, contract: dict[str, Any]) -> dict[str, Any]:
        """The contract with the target's identity, and its place relative to the run, which holds after a move."""
        stored = self.anchors.store(contract["checkpoint"])
        carried = None if is_by_stamp(self.identity) else self.identity.get("id")
        return contract | {"stored": stored, "identity": carried}

    def naming(self, checkpoint: Path) -> "OpenedRun":
        """The run, whose entries name this checkpoint by the identity that it carries, else by its stamp."""
        opened = open_checkpoint(checkpoint, count_steps=False)
        return replace(self, identity=known_states(self.journal.entries).identity_in(opened))

    def finishing(self, entry: Entry) -> "OpenedRun":
        """The run, whose receipt names the checkpoint of an earlier entry: an intent that is recovered, or what is undone."""
        named = self.find(entry.data.get("undoes")) or entry
        return replace(self, identity=RollbackReceipt.view(named.data).identity)

    def record(self, kind: str, data: dict[str, Any]) -> str:
        """Write an entry of the transaction durably; returns its id. Raises `RollbackError` when it is not on disk.

        `kind` and `data` are those of `rollback.transaction`, which does not know the journal.
        """
        refs = tuple(str(data[key]) for key in ("undoes", "intent") if data.get(key))
        added: dict[str, Any] = {}
        if self.force is not None and (kind in INTENTS or kind == EntryKind.RECOVER_RECEIPT):
            added |= {"force": self.force, "overrode": list(self.overrode)}
        if self.identity and kind in (EntryKind.ROLLBACK_INTENT, EntryKind.ROLLBACK_RECEIPT):
            added["identity"] = dict(self.identity)
        if is_by_stamp(self.identity) and kind in (EntryKind.ROLLBACK_RECEIPT, EntryKind.UNDO_RECEIPT):
            added |= {"identity": dict(self.identity), "stamp": stamp_or_none(self._place_of(kind, data))}
        event = EVENTS[EntryKind(kind)].from_json(data | added)
        try:
            fresh = not self.paths.journal_dir.is_dir()
            entry = self.writer.write(
                event, step=data.get("step"), launch=data.get("launch"), title=_title(kind, data), refs=refs
            )
            for directory in list(self.paths.journal_dir.parents)[:2] if fresh else ():
                REAL_DISK.sync_directory(directory)
        except (JournalError, Refusal) as problem:
            raise RollbackError(problem.message, problem.remedy) from problem
        return entry.id

    def _place_of(self, kind: str, data: Mapping[str, Any]) -> Path:
        """Where the target of a rollback lies when it is done; an undo puts it back where it lay before."""
        undone = self.find(data.get("undoes")) if kind == EntryKind.UNDO_RECEIPT else None
        source = "" if undone is None else RollbackReceipt.of(undone).source
        return Path(source or os.path.join(data["root"], data["entry"]))


@contextmanager
def open_run(
    settings: Settings,
    *,
    force: str | None = None,
    recovering: bool = False,
    writing: bool = True,
    while_running: bool = False,
) -> Iterator[OpenedRun]:
    """Hold the run's rollback lock for the duration of a block.

    Raises `RunAlive`, `IntentOpen` (unless `recovering`), `Locked` or, for a damaged journal, `Refusal` before anything is
    changed; `force` (a reason, which is journalled) goes on with a run that seems alive and with a damaged journal.
    With `writing` False, no lock is taken and nothing is created. `while_running`: the run may be alive.
    """
    paths, store = settings.paths, _store_of(settings)
    if not writing:
        yield _opened(settings, store, _settled_journal(paths, force, recovering=False), force)
        return
    is_new = not paths.journal_dir.is_dir()
    place, standing = look(paths)
    if place is not None:
        refuse_copy(place, standing, paths)
        _refuse_parents(place, settings)
    paths.run_dir.mkdir(parents=True, exist_ok=True)
    with hold_lock(paths.lock_path):
        journal = _settled_journal(paths, force, recovering=recovering)
        if force is None and not while_running and not recovering:
            _refuse_alive(paths, journal)
        opened = _opened(settings, store, journal, force, is_new=is_new)
        try:
            if find_open_transaction(journal.entries) is None:
                _remove_leftovers(opened, place)
            yield opened
        finally:
            opened.writer.close()


def _settled_journal(paths: RunPaths, force: str | None, *, recovering: bool) -> Journal:
    """The sound journal; raises `IntentOpen` where a transaction is open, unless it is what is worked on."""
    journal = read_sound_journal(paths, force)
    intent = find_open_transaction(journal.entries)
    if intent is not None and not recovering:
        verb = intent.kind.partition(".")[0]
        text = f"{verb}{_to(intent.step)}, begun at {intent.ts}, is not finished ({intent.id})"
        raise IntentOpen(text, "finish or revert it with `chronicle recover`")
    return journal


def read_sound_journal(paths: RunPaths, force: str | None) -> Journal:
    """The journal; raises `Refusal` when it is damaged, unless a reason is given: a lost entry may be a transaction.

    A last line that a crash cut short is said and does not refuse (`find_damage` says why).
    """
    journal = read_journal(paths)
    damage = find_damage(paths, journal)
    if damage and force is None:
        raise Refusal(describe_damage(paths, damage), DAMAGED_HINT)
    if damage:
        say(f"{describe_damage(paths, damage)}; going on: {force}")
    for problem in journal.problems:
        if problem.check == "torn-line":
            where = problem.path.relative_to(paths.run_dir).as_posix()
            say(f"`{where}` line {problem.line}: {problem.message}; nothing acted on it")
    return journal


def _store_of(settings: Settings) -> tuple[Path, Any] | None:
    """The view of the run's object store and the store itself; None where the checkpoints are on a disk."""
    if settings.checkpoints_url is None:
        return None
    from rollback.disk.remote import local_path, open_bucket

    bucket = open_bucket(settings.checkpoints_url)  # refuses a kind of store in which nothing can be changed
    return local_path(settings.checkpoints_url), bucket


def _opened(
    settings: Settings, store: tuple[Path, Any] | None, journal: Journal, force: str | None, *, is_new: bool = False
) -> OpenedRun:
    root, bucket = store or (_root_of(settings), None)
    return OpenedRun(
        settings=settings,
        paths=settings.paths,
        root=root,
        journal=journal,
        writer=JournalWriter(settings.paths, checkpoints=settings.checkpoints_dir),
        force=force,
        is_new=is_new,
        overrode=() if force is None else damage_overridden(settings.paths, journal),
        bucket=bucket,
    )


def _root_of(settings: Settings) -> Path:
    return Path(os.path.abspath(settings.checkpoints_dir or settings.logs_dir.parent / "checkpoints"))


def _remove_leftovers(opened: OpenedRun, place: Place | None) -> None:
    """Remove what earlier transactions left beside the directories that they worked in."""
    kinds = (EntryKind.ROLLBACK_INTENT, EntryKind.UNDO_INTENT, EntryKind.PRUNE)

    named = {str(entry.data.get("root") or "") for entry in opened.journal.of_kind(*kinds)}
    for root in (Path(one) for one in named if one and not is_url(one)):
        if place is None or not is_parents(place, root):
            remove_leftovers(root, closed_intents(opened.journal.entries))


def _refuse_parents(place: Place, settings: Settings) -> None:
    """Raise `Refusal` when the checkpoints are those of the run that this one began from: they are never changed from here."""
    root = _root_of(settings)
    if is_parents(place, root) and place.parent is not None:
        raise Refusal(
            f"`{root}` holds the checkpoints of {describe_parent(place.parent)}, from which this run began: "
            "nothing of a parent is changed",
            "copy the checkpoints that this run needs into a directory of its own, and name it with --checkpoints DIR",
        )


def _refuse_alive(paths: RunPaths, journal: Journal) -> None:
    try:
        ensure_startable(paths, journal, now=time.time())
    except LaunchRefused as problem:
        raise RunAlive(problem.message, problem.remedy) from problem


def _title(kind: str, data: Mapping[str, Any]) -> str:
    to = _to(data.get("step"))
    ratio = data.get("lr_ratio")
    titles = {
        EntryKind.ROLLBACK_INTENT: f"rollback{to} begun",
        EntryKind.ROLLBACK_RECEIPT: f"rollback{to}" + (f", LR × {ratio:g}" if ratio not in (None, 1.0) else ""),
        EntryKind.UNDO_INTENT: f"undo of the rollback{to} begun",
        EntryKind.UNDO_RECEIPT: f"rollback{to} undone",
        EntryKind.RECOVER_RECEIPT: f"unfinished transaction {data.get('outcome')}",
    }
    return titles[EntryKind(kind)]


def _to(step: int | None) -> str:
    return "" if step is None else f" to step {step}"


# --- What the journal says about earlier transactions


def closed_intents(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Ids of the transactions that are over; a workspace of theirs may still exist."""
    closed: list[str] = []
    for entry in entries:
        if entry.kind in RECEIPTS:
            closed += intents_closed_by(entry)
        elif entry.kind == EntryKind.PRUNE:
            closed.append(entry.id)
    return tuple(closed)


def find_undoable(entries: Sequence[Entry]) -> Entry | None:
    """The receipt of the last rollback that is not undone, or None."""
    undone = {ref for entry in entries if entry.kind == UndoReceipt.KIND for ref in entry.refs}
    present = [entry for entry in entries if entry.kind == RollbackReceipt.KIND and entry.id not in undone]
    return present[-1] if present else None
