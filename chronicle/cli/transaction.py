"""Shared by rollback, undo and recover: lock, checks before the change, journal entries, and the question to the user.

Used by the commands that change checkpoints. The edit itself is in `rollback.transaction`.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer

from chronicle.checkpoints import is_by_stamp, known_states, stamp_or_none
from chronicle.cli.options import CommandResult
from chronicle.errors import ChronicleError, Declined, JournalError, Refusal, UsageProblem
from chronicle.journal import Entry, Journal, JournalWriter, read_journal
from chronicle.journal.events import (
    EVENTS,
    INTENTS,
    RECEIPTS,
    EntryKind,
    JournalEvent,
    Pruned,
    Quarantined,
    QuarantineUndone,
    RecoverReceipt,
    RollbackIntent,
    RollbackReceipt,
    RunFork,
    RunPlace,
    SetAside,
    SetAsideUndone,
    UndoIntent,
    UndoReceipt,
    events_of,
    find_open_transaction,
    intents_closed_by,
)
from chronicle.journal.events import (
    read as read_event,
)
from chronicle.journal.place import Anchors, Place, describe_parent, is_parents, is_same_directory, look, refuse_copy
from chronicle.journal.reader import DAMAGED_HINT, damage_overridden, describe_damage, find_damage
from chronicle.launch.admission import LaunchRefused, ensure_startable
from chronicle.paths import RunPaths
from chronicle.settings import Settings, is_url
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import open_checkpoint
from rollback.checkpoint.manifest import read_manifest
from rollback.checks.verify import Verification, verify_and_read
from rollback.disk.content import ByteProgress
from rollback.disk.durable import REAL_DISK
from rollback.disk.lock import hold_lock
from rollback.errors import IntentOpen, RollbackError, RunAlive, one_line
from rollback.plan.plan import Plan, format_plan
from rollback.transaction.apply import apply_plan
from rollback.transaction.change import Prepared, hidden_root, workspace_of
from rollback.transaction.copied import in_this_copy
from rollback.transaction.protocol import remove_leftovers

__all__ = [
    "OpenedRun",
    "agree",
    "apply_and_report",
    "byte_progress",
    "closed_intents",
    "find_undoable",
    "has_guard",
    "move_back",
    "open_run",
    "read_every_byte",
    "read_sound_journal",
    "uninterrupted",
]

@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run while a command works on its checkpoints: its paths, its journal as read, and a writer."""

    settings: Settings
    paths: RunPaths
    root: Path
    journal: Journal
    writer: JournalWriter
    force: str | None
    is_new: bool  # the journal did not exist before
    overrode: tuple[str, ...] = ()  # the damage of the journal that was known when a reason was given
    place: Place | None = None  # as recorded before this command; None: never written to
    identity: Mapping[str, Any] = field(default_factory=dict)  # of the checkpoint that is worked on

    @property
    def anchors(self) -> Anchors:
        """The directories that stored paths are relative to, as they lie now."""
        return self.writer.place.anchors(self.paths.run_dir)

    def moved(self, intent: str, value: Any) -> Any:
        """A value with the absolute paths of the time when a transaction was prepared replaced by those of today.

        Its intent recorded them (`anchors`); a copy would otherwise finish or tidy up what lies in the original.
        """
        entry = self._entry(intent)
        recorded = None if entry is None else entry.data.get("anchors")
        if not isinstance(recorded, Mapping):
            return value
        then = Anchors(run=str(recorded.get("run") or ""), roots=tuple(str(root) for root in recorded.get("roots") or ()))
        beside = [  # they lie beside a root: no anchor of the journal holds them
            (str(before), str(now))
            for one, other in zip(then.roots, self.anchors.roots, strict=False)
            for before, now in zip(beside_root(Path(one), intent), beside_root(Path(other), intent), strict=True)
        ]

        def today(text: str) -> str:
            hits = (now + text[len(old) :] for old, now in beside if text == old or text.startswith(old + "/"))
            return next(hits, None) or str(self.anchors.resolve(then.store(text)))

        return _each_text(value, today)

    def prepared_here(self, intent: Entry, record: Any) -> Any:
        """What an open transaction prepared, with the paths of today and, in a copy, the inodes of its files here."""
        found = self.moved(intent.id, record)
        if not self._was_copied_since(intent):
            return found
        return in_this_copy(Prepared.from_json(found)).to_json()

    def refuse_shared(self, entry: Entry) -> None:
        """Raise `Refusal` when a transaction of the run that this one was copied from changed a file that both share."""
        if not self._was_copied_since(entry, forked=True):
            return
        configs = [str(config["path"]) for config in entry.data.get("configs") or ()]
        for path in (*configs, *(str(path) for path in entry.data.get("config_paths") or ())):
            if self.anchors.store(path) == path:
                raise Refusal(
                    f"{entry.kind.partition('.')[0]} {entry.id} changed `{path}`, which is outside this fork: "
                    f"expected a file of its own below `{self.anchors.run}` or `{self.root}`",
                    "change the file in the run that this one was copied from; nothing was changed here",
                )

    def _was_copied_since(self, entry: Entry, *, forked: bool = False) -> bool:
        """Whether a person declared, after this entry, that the directory is a copy (or moved so that inodes changed)."""
        later = self.journal.entries[self.journal.entries.index(entry) + 1 :]
        return any(
            (isinstance(event, RunFork) and event.copied) or (not forked and isinstance(event, RunPlace) and event.copied)
            for event in map(read_event, later)
        )

    def contract_form(self, contract: dict[str, Any]) -> dict[str, Any]:
        """The contract with the target's identity, and its place relative to the run, which holds after a move."""
        stored = self.anchors.store(contract["checkpoint"])
        carried = None if is_by_stamp(self.identity) else self.identity.get("id")
        return contract | {"stored": stored, "identity": carried}

    def refuse_unknown_place(self, intent: Entry) -> None:
        """Raise `Refusal` when it is not known where an open transaction worked: `run.json` is gone."""
        root = str(intent.data.get("root") or "")
        if is_url(root):
            raise Refusal(f"transaction {intent.id} worked in `{root}`", f"name it: `chronicle recover --checkpoints {root}`")
        if not os.path.isabs(root):
            raise Refusal(
                f"transaction {intent.id} worked in `{root}`, and no `run.json` says where that is: {self.paths.run_dir}",
                "restore `run.json` from a backup",
            )

    def refuse_outside(self, receipt: Entry) -> None:
        """Raise `Refusal` when a receipt names a directory that is not one of this run's own."""
        recorded, own = RollbackReceipt.of(receipt).root, str(self.root)
        if recorded and not is_same_directory(recorded, own):
            raise Refusal(
                f"rollback {receipt.id} was made in `{recorded}`; the checkpoints of this run are `{own}`: "
                "nothing outside the run is changed",
                "name the right directory with --checkpoints, or undo it in the run that it belongs to",
            )

    def naming(self, checkpoint: Path) -> "OpenedRun":
        """The run, whose entries name this checkpoint by the identity that it carries, else by its stamp."""
        opened = open_checkpoint(checkpoint, count_steps=False)
        return replace(self, identity=known_states(self.journal.entries).identity_in(opened))

    def finishing(self, entry: Entry) -> "OpenedRun":
        """The run, whose receipt names the checkpoint of an earlier entry: an intent that is recovered, or what is undone."""
        named = self._entry(entry.data.get("undoes")) or entry
        return replace(self, identity=RollbackReceipt.view(named.data).identity)

    def _entry(self, wanted: object) -> Entry | None:
        return next((entry for entry in self.journal.entries if entry.id == wanted), None)

    def _place_of(self, kind: str, data: Mapping[str, Any]) -> Path:
        """Where the target of a rollback lies when it is done; an undo puts it back where it lay before."""
        undone = self._entry(data.get("undoes")) if kind == EntryKind.UNDO_RECEIPT else None
        source = "" if undone is None else RollbackReceipt.of(undone).source
        return Path(source or os.path.join(data["root"], data["entry"]))

    def record(self, kind: str, data: dict[str, Any]) -> str:
        """Write an entry of the transaction durably; returns its id. Raises `RollbackError` when it is not on disk.

        `kind` and `data` are those of `rollback.transaction`, which does not know the journal.
        """
        step, launch = data.get("step"), data.get("launch")
        refs = tuple(str(data[key]) for key in ("undoes", "intent") if data.get(key))
        if self.force is not None and (kind in INTENTS or kind == EntryKind.RECOVER_RECEIPT):
            data = data | {"force": self.force, "overrode": list(self.overrode)}
        if self.identity and kind in (EntryKind.ROLLBACK_INTENT, EntryKind.ROLLBACK_RECEIPT):
            data = data | {"identity": dict(self.identity)}
        if is_by_stamp(self.identity) and kind in (EntryKind.ROLLBACK_RECEIPT, EntryKind.UNDO_RECEIPT):
            data = data | {"identity": dict(self.identity), "stamp": stamp_or_none(self._place_of(kind, data))}
        event = EVENTS[EntryKind(kind)].from_json(data | {"anchors": self.anchors.to_json()})
        try:
            fresh = not self.paths.journal_dir.is_dir()
            entry = self.writer.write(event, step=step, launch=launch, title=_title(event), refs=refs)
            if fresh:
                _sync_upwards(self.paths.journal_dir)
        except (JournalError, Refusal) as problem:
            raise RollbackError(problem.message, problem.remedy) from problem
        return entry.id


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
    paths = settings.paths
    if not writing:
        journal = read_sound_journal(paths, force)
        intent = find_open_transaction(journal.entries)
        if intent is not None:
            raise unfinished(intent)
        yield _opened(settings, journal, force)
        return
    is_new = not paths.journal_dir.is_dir()
    place, standing = look(paths)
    if place is not None:
        refuse_copy(place, standing, paths)
        _refuse_parents(place, settings)
    paths.run_dir.mkdir(parents=True, exist_ok=True)
    with hold_lock(paths.lock_path):
        journal = read_sound_journal(paths, force)
        intent = find_open_transaction(journal.entries)
        if intent is not None and not recovering:
            raise unfinished(intent)
        if force is None and not while_running:
            _refuse_alive(paths, journal, recovering)
        opened = replace(_opened(settings, journal, force, is_new=is_new), place=place)
        try:
            for root in _roots(journal) if intent is None else ():
                if place is not None and is_parents(place, root):
                    continue
                remove_leftovers(root, closed_intents(journal.entries), moved=opened.moved)
            yield opened
        finally:
            opened.writer.close()


def read_sound_journal(paths: RunPaths, force: str | None) -> Journal:
    """The journal; raises `Refusal` when it is damaged, unless a reason is given: a lost entry may be a transaction.

    A last line that a crash cut short is said and does not refuse (`find_damage` says why).
    """
    journal = read_journal(paths)
    damage = find_damage(paths, journal)
    if damage and force is None:
        raise Refusal(describe_damage(paths, damage), DAMAGED_HINT)
    if damage:
        print(f"chronicle: {describe_damage(paths, damage)}; going on: {force}", file=sys.stderr)
    for problem in journal.problems:
        if problem.check == "torn-line":
            where = problem.path.relative_to(paths.run_dir).as_posix()
            print(f"chronicle: `{where}` line {problem.line}: {problem.message}; nothing acted on it", file=sys.stderr)
    return journal


def unfinished(intent: Entry) -> IntentOpen:
    """The error of each command but `recover` while a transaction is open."""
    verb = intent.kind.partition(".")[0]
    step = "" if intent.step is None else f" to step {intent.step}"
    return IntentOpen(
        f"{verb}{step}, begun at {intent.ts}, is not finished ({intent.id})",
        "finish or revert it with `chronicle recover`",
    )


def _root_of(settings: Settings) -> Path:
    return Path(os.path.abspath(settings.checkpoints_dir or settings.logs_dir.parent / "checkpoints"))


def _opened(settings: Settings, journal: Journal, force: str | None, *, is_new: bool = False) -> OpenedRun:
    return OpenedRun(
        settings=settings,
        paths=settings.paths,
        root=_root_of(settings),
        journal=journal,
        writer=JournalWriter(settings.paths, checkpoints=settings.checkpoints_dir),
        force=force,
        is_new=is_new,
        overrode=() if force is None else damage_overridden(settings.paths, journal),
    )


def beside_root(root: Path, intent: str) -> tuple[Path, Path]:
    """Where a transaction works beside a checkpoint root: its workspace, and the root's name while it is hidden."""
    return workspace_of(root.parent, intent), hidden_root(root, intent)


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """The value with each text changed, keys of mappings included: what must be read back is listed by path."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _each_text(item, change) for key, item in value.items()}
    return [_each_text(item, change) for item in value] if isinstance(value, list | tuple) else value


def _roots(journal: Journal) -> set[Path]:
    """The checkpoints directories that transactions of this run worked in."""
    kinds = frozenset((EntryKind.ROLLBACK_INTENT, EntryKind.UNDO_INTENT, EntryKind.PRUNE))
    events = (read_event(entry) for entry in journal.entries if entry.kind in kinds)
    named = {e.root for e in events if isinstance(e, RollbackIntent | UndoIntent | Pruned)}
    return {Path(root) for root in named if root and not is_url(root)}


def _refuse_parents(place: Place, settings: Settings) -> None:
    """Raise `Refusal` when the checkpoints are those of the run that this one began from: they are never changed from here."""
    root = _root_of(settings)
    if is_parents(place, root) and place.parent is not None:
        raise Refusal(
            f"`{root}` holds the checkpoints of {describe_parent(place.parent)}, from which this run began: "
            "nothing of a parent is changed",
            "copy the checkpoints that this run needs into a directory of its own, and name it with --checkpoints DIR",
        )


def _refuse_alive(paths: RunPaths, journal: Journal, recovering: bool) -> None:
    if recovering:
        return
    try:
        ensure_startable(paths, journal, now=time.time())
    except LaunchRefused as problem:
        raise RunAlive(problem.message, problem.remedy) from problem


def _sync_upwards(directory: Path) -> None:
    """Fsync the new directories of the journal, so that its first entry is durable."""
    for path in (directory, directory.parent, directory.parent.parent):
        REAL_DISK.sync_directory(path)


def _title(event: JournalEvent) -> str:
    match event:
        case RollbackIntent():
            return f"rollback{_to(event.step)} begun"
        case RollbackReceipt():
            ratio = event.lr_ratio
            return f"rollback{_to(event.step)}" + (f", LR × {ratio:g}" if ratio is not None and ratio != 1.0 else "")
        case UndoIntent():
            return f"undo of the rollback{_to(event.step)} begun"
        case UndoReceipt():
            return f"rollback{_to(event.step)} undone"
        case RecoverReceipt():
            return f"unfinished transaction {event.outcome}"
    return str(event.KIND)


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


def find_undoable(entries: Sequence[Entry], wanted: str | None = None) -> Entry | None:
    """The receipt of the last rollback that is not undone, or None; a named one must be that one.

    Raises `ChronicleError` when the named one is undone, or when another rollback was made after it.
    """
    undone = {ref for entry in entries if entry.kind == EntryKind.UNDO_RECEIPT for ref in entry.refs}
    present = [entry for entry in entries if entry.kind == EntryKind.ROLLBACK_RECEIPT and entry.id not in undone]
    last = present[-1] if present else None
    if wanted is None:
        return last
    named = [entry for entry in present if entry.id.endswith(wanted.upper()) or entry.id.startswith(wanted.upper())]
    if not named:
        raise ChronicleError(f"no rollback `{wanted}` that can be undone", "`chronicle log` lists the rollbacks")
    if last is not None and named[-1].id != last.id:
        raise ChronicleError(
            f"rollback {last.id} was made after {named[-1].id}: expected to undo the later one first",
            "`chronicle undo` undoes the last one",
        )
    return last


# --- Show a plan, ask, apply it


def apply_and_report(plan: Plan, opened: OpenedRun, *, yes: bool) -> CommandResult:
    """Show the plan, ask on a terminal, apply it. Raises `UsageProblem` before any change when nobody can be asked."""
    text = format_plan(plan, guarded=has_guard(plan, opened.journal))
    if not plan.changes_anything:
        done = f"already at step {plan.step}: nothing to change"
        return CommandResult(text=done, data=plan.to_json() | {"changed": False})
    agree("Apply this plan?", text, yes=yes)
    opened = opened.naming(Path(plan.source))
    with uninterrupted():
        receipt = apply_plan(
            plan,
            objects_dir=opened.paths.objects_dir,
            record=opened.record,
            contract_path=opened.paths.contract_path,
            contract_form=opened.contract_form,
        )
    talk = [f"new journal: {opened.paths.journal_dir}"] if opened.is_new else []
    talk += [receipt.left_over] if receipt.left_over else []
    talk.append("undo it with `chronicle undo`")
    proved = has_guard(plan, opened.journal)  # else nothing compares what the next launch loads
    done = f"the next launch will load step {plan.step}" if proved else f"step {plan.step} is ready for the next launch"
    lines = [text, "", f"done: {done} ({receipt.id})"]
    data = {"changed": True, "receipt": receipt.id, "plan": plan.to_json() | {"digest": plan.digest}}
    return CommandResult(text="\n".join(lines), data=data, talk=tuple(talk))


def has_guard(plan: Plan, journal: Journal) -> bool:
    """Whether a guard recorded the checkpoint or a launch of this run, so that one will check the next launch."""
    if any(True for _ in journal.of_kind(EntryKind.GUARD_ATTACHED, EntryKind.GUARD_VERDICT, EntryKind.GUARD_SAVED)):
        return True
    manifest = read_manifest(Path(plan.source)) if plan.has_manifest else None
    return bool(manifest is not None and manifest.memory)


def agree(question: str, text: str, *, yes: bool) -> None:
    """Show `text` and ask; raises `UsageProblem` without a terminal and `Declined` when the answer is no."""
    if yes:
        return
    print(text, file=sys.stderr)
    if not sys.stdin.isatty():
        raise UsageProblem("no terminal to ask on: nothing was changed", "repeat with --yes to go on without asking")
    if not typer.confirm(question, err=True):
        raise Declined


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Block Ctrl-C during a transaction: it takes milliseconds, and an interrupted one would need `recover`."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


# --- What was moved away, back again


def move_back(opened: OpenedRun, kind: type[Quarantined] | type[SetAside], wanted: str, *, yes: bool) -> CommandResult:
    """Move what one `verify --quarantine` or `keep` moved away back to where it was; asks first.

    Raises `ChronicleError` when there is no such entry, `Refused` instead of overwriting a file.
    """
    from rollback.transaction import cleanup  # only where something comes back

    strays = kind is Quarantined
    entries, noun = ("quarantines", "strays") if strays else ("entries of `keep`", "checkpoints")
    made_here = events_of(opened.journal.entries, kind)
    found = [(entry, event) for entry, event in made_here if wanted.upper() in (entry.id, entry.id[-len(wanted) :])]
    if len(found) != 1:
        raise ChronicleError(f"{len(found)} {entries} are called `{wanted}`: expected one", "`chronicle log` lists them")
    made, event = found[0]
    root, moves = Path(event.root), cleanup.moves_from_json(list(event.moves))
    text = "\n".join([f"{noun} to move back:", *(f"  {one_line(move.path)}" for move in moves)])
    agree("Move them back?", text, yes=yes)
    where = cleanup.quarantine_dir(root, made.id) if strays else cleanup.set_aside_dir(root, made.id)
    with uninterrupted():
        undone = QuarantineUndone(root=str(root)) if strays else SetAsideUndone(root=str(root))
        entry = opened.writer.write(undone, title=f"{len(moves)} {noun} moved back", refs=(made.id,))
        count = cleanup.restore(root, where, moves)
        if isinstance(event, Quarantined):
            pointers = cleanup.pointers_from_json(event.pointers)
            cleanup.point_elsewhere(root, [pointer.reversed() for pointer in pointers])
    return CommandResult(text=f"{text}\n\ndone: {count} moved", data={"changed": True, "id": entry.id, "moved": count})


# --- Progress bar

WORTH_BYTES = 200 * 10**6
WORTH_CHECKPOINTS = 20


@contextmanager
def byte_progress(total_bytes: int, checkpoints: int = 1) -> Iterator[ByteProgress | None]:
    """A function that takes the number of bytes read; None where no bar is shown."""
    if (total_bytes < WORTH_BYTES and checkpoints < WORTH_CHECKPOINTS) or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress("verifying", *columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verifying", total=total_bytes)
        yield lambda count: bar.advance(task, count)


def read_every_byte(checkpoint: Checkpoint) -> Verification:
    """Verify one checkpoint with its checksums; a large one on all cores."""
    if checkpoint.size_bytes < WORTH_BYTES:
        return verify_and_read(checkpoint, full=True)  # threads cost more than they save
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(os.cpu_count()) as executor, byte_progress(checkpoint.size_bytes) as bar:
        return verify_and_read(checkpoint, full=True, executor=executor, progress=bar)
