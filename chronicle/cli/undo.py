"""`chronicle undo` takes back what changed something outside the journal; `chronicle recover` ends an interrupted rollback.

The journal is the log of operations: `undo --list` reads it, and the undo of each kind is that of the verb that did it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from chronicle import goback
from chronicle.cli.options import CHANGING, FORCING, Changing, CommandResult, Forcing, InRun
from chronicle.cli.transaction import agree
from chronicle.errors import ChronicleError, Refusal
from chronicle.goback.applying import refuse_elsewhere
from chronicle.journal import Entry, read_journal
from chronicle.journal.events import (
    EntryKind,
    Hardware,
    Note,
    Restarted,
    RollbackReceipt,
    find_open_transaction,
)
from chronicle.story.plain import format_when
from rollback.transaction.apply import newer_checkpoints


class Operation(NamedTuple):
    """One act that changed something outside the journal. `stands`: why it cannot be undone, or that it is; "" where it can."""

    entry: Entry
    stands: str

    @property
    def id(self) -> str:
        """The last eight letters, as everywhere."""
        return self.entry.id[-8:]


def undo_rollback(operation: str | None = None, listed: bool = False, at: Changing = CHANGING) -> CommandResult:
    """Undo the last rollback, or what `undo --list` names.

    Bytes, modes and times of edited files are restored, and later checkpoints are moved back. Checkpoints that a
    later launch saved are moved to `abandoned/`, never overwritten. With an id, whatever `undo --list` names: strays and
    checkpoints that were moved aside, an excluded node, tags, the archive. What cannot be undone is refused with the reason.

    Example: chronicle undo

    What was done to this run: chronicle undo --list

    Options:
      [ID]: Id of the operation. Without it, the last rollback.
      --list: List what was done, and whether it can be undone.
    """
    settings = at.settings()
    if listed:
        return _list(operations(read_journal(settings.paths).entries))
    if operation is not None:
        chosen = _find(operations(read_journal(settings.paths).entries), operation)
        if chosen.entry.kind != EntryKind.ROLLBACK_RECEIPT:
            return _undo_other(chosen, at.of(settings))
    with goback.open_run(settings, force=at.force) as opened:
        entry = goback.find_undoable(opened.journal.entries, operation)
        if entry is None:
            return CommandResult(text="no rollback to undo", data={"changed": False})
        refuse_elsewhere(opened, entry)
        in_store = opened.bucket is not None
        newer = () if in_store else newer_checkpoints(entry.data)
        text = _describe_stored(entry) if in_store else _describe(entry, newer)
        agree("Undo it?", text, yes=at.yes)
        receipt = goback.undo(opened, entry, newer)
    data: dict[str, object] = {"changed": True, "receipt": receipt.id}
    if not in_store:
        data |= {"undone": entry.id, "abandoned": list(newer)}
    talk = (receipt.left_over,) if receipt.left_over else ()
    return CommandResult(text=f"{text}\n\ndone ({receipt.id})", data=data, talk=talk)


def _describe_stored(entry: Entry) -> str:
    store = RollbackReceipt.of(entry).store
    return (
        f"undo of {entry.title or 'rollback'} ({entry.id})\n\n  pointer     {store['pointer']}\n"
        f"  remove      {store['folder']}  (the copy that the rollback made)"
    )


def _describe(entry: Entry, newer: tuple[str, ...]) -> str:
    receipt = RollbackReceipt.of(entry)
    lines = [f"undo of {entry.title or 'rollback'} ({entry.id}, {format_when(entry.ts)})", ""]
    lines += [f"  restore     {file['path'] or receipt.entry}" for file in receipt.files]
    lines += [f"  move back   {name}" for name in receipt.abandoned]
    lines += [f"  pointer     {pointer['path']}" for pointer in receipt.pointers]
    lines += [f"  move aside  {name}  (saved after the rollback)" for name in newer]
    return "\n".join(lines)


# --- what was done, and what takes it back


def operations(entries: Sequence[Entry]) -> list[Operation]:
    """Every act of the run that changed something outside its journal, in order of time."""
    backs = [one for one in entries if one.kind in TAKEN_BACK or (one.kind == EntryKind.NOTE and _is_mark(one))]
    done = {ref: entry for entry in backs for ref in entry.refs}
    last = goback.find_undoable(entries)
    return [
        Operation(entry, _stands(entry, entries[place + 1 :], done.get(entry.id), last))
        for place, entry in enumerate(entries)
        if _is_act(entry)
    ]


def _is_act(entry: Entry) -> bool:
    """Whether this entry tells of a change outside the journal."""
    if entry.kind == EntryKind.RESTART:
        return Restarted.of(entry).decision.startswith("again")
    if entry.kind == EntryKind.HARDWARE:
        return Hardware.of(entry).action is not None
    if entry.kind == EntryKind.NOTE:
        return _is_mark(entry)
    return entry.kind in FINAL or entry.kind in UNDONE_BY_THEIR_VERB


def _is_mark(entry: Entry) -> bool:
    """Whether this note is what `chronicle runs --add-tag`, `--archive` and their opposites write; a person's has words."""
    note = Note.of(entry)
    return note.archived is not None or bool(note.untags) or (bool(note.tags) and entry.title == _mark_title(note))


def _mark_title(note: Note) -> str:
    return ", ".join(f"tag {tag}" for tag in note.tags)


UNDONE_BY_THEIR_VERB = (EntryKind.ROLLBACK_RECEIPT, EntryKind.QUARANTINE)
TAKEN_BACK = (EntryKind.UNDO_RECEIPT, EntryKind.QUARANTINE_UNDONE)
FINAL = {  # kinds that nothing takes back, and the way that there is instead
    EntryKind.UNDO_RECEIPT: "an undo is not undone: `chronicle rollback` makes the rollback again",
    EntryKind.RECOVER_RECEIPT: "it ended an interrupted transaction: the checkpoints are as before it or as planned",
    EntryKind.QUARANTINE_UNDONE: "`chronicle verify --quarantine` moves the strays again",
    EntryKind.PRUNE: "what was deleted does not come back",
    EntryKind.SWEEP: "processes that were ended do not come back",
    EntryKind.IMPORT: "imported points are part of the run: import the others as another run",
    EntryKind.RESTART: "a launch that has begun is not undone: `chronicle rollback` goes back to before it",
}


def _stands(entry: Entry, later: Sequence[Entry], taken_back: Entry | None, last: Entry | None) -> str:
    """Why this act cannot be undone; "" where it can."""
    if taken_back is not None:
        return f"undone by {taken_back.id[-8:]}"
    if entry.kind in FINAL:
        return FINAL[EntryKind(entry.kind)]
    if entry.kind == EntryKind.ROLLBACK_RECEIPT and last is not None and last.id != entry.id:
        return f"rollback {last.id[-8:]} was made after it: undo that first"
    if entry.kind == EntryKind.HARDWARE:
        said = Hardware.of(entry)
        opposite = [Hardware.of(one) for one in later if one.kind == EntryKind.HARDWARE]
        if any(one.host == said.host and one.action not in (None, said.action) for one in opposite):
            return "undone: the node was excluded or readmitted again later"
    return ""


def _find(found: Sequence[Operation], wanted: str) -> Operation:
    """The operation of this id."""
    name = wanted.upper()
    chosen = [one for one in found if one.entry.id.endswith(name) or one.entry.id.startswith(name)]
    if len(chosen) > 1:
        raise ChronicleError(f"{len(chosen)} operations are called `{wanted}`: expected one", "`chronicle undo --list`")
    if not chosen:
        raise ChronicleError(f"no operation `{wanted}` in this run", "`chronicle undo --list` lists them")
    return chosen[0]


def _list(found: Sequence[Operation]) -> CommandResult:
    lines = []
    for one in found:
        lines.append(f"{one.id}  {format_when(one.entry.ts)}  {one.entry.title or one.entry.kind}")
        lines.append(f"          {one.stands or f'chronicle undo {one.id}'}")
    rows = [
        {"id": one.entry.id, "time": one.entry.ts, "kind": one.entry.kind, "title": one.entry.title, "step": one.entry.step,
         "can_be_undone": not one.stands, "why_not": one.stands or None}
        for one in found
    ]  # fmt: skip
    return CommandResult(text="\n".join(lines) or "nothing outside the journal was changed", data=rows)


def _undo_other(one: Operation, at: Changing) -> CommandResult:
    """Undo an operation that is no rollback, by the verb that did it."""
    if one.stands:
        what = f"`{one.entry.title or one.entry.kind}` ({one.id}): {one.stands}"
        raise Refusal(what, "`chronicle undo --list` says what can be undone")
    if one.entry.kind == EntryKind.QUARANTINE:
        from chronicle.cli.verify import verify_checkpoints

        return verify_checkpoints(restore=one.entry.id, yes=at.yes, at=at)
    if one.entry.kind == EntryKind.HARDWARE:
        from chronicle.cli.hardware import exclude_node
        from chronicle.launch.admission import EXCLUDE

        said = Hardware.of(one.entry)
        return exclude_node(said.host, f"undo of {one.id}", said.action == EXCLUDE, InRun(run=at.run, logs=at.logs))
    from chronicle.runs import mark_runs

    note = Note.of(one.entry)
    archived = None if note.archived is None else not note.archived
    why = f"undo of {one.id}"
    mark_runs([at.settings().paths], tags=note.untags, untags=note.tags, archived=archived, why=why, undoes=one.entry.id)
    return CommandResult(text=f"undone: {one.entry.title}", data={"changed": True, "undone": one.entry.id})


# --- chronicle recover


def recover_transaction(at: Forcing = FORCING) -> CommandResult:
    """Finish or revert an interrupted rollback or undo.

    It is finished if it was fully prepared, else reverted. Running it again is safe.

    Example: chronicle recover
    """
    with goback.open_run(at.settings(), force=at.force, recovering=True) as opened:
        intent = find_open_transaction(opened.journal.entries)
        if intent is None:
            return CommandResult(text="nothing to recover", data={"recovered": None})
        receipt = goback.recover(opened, intent)
    outcome = "reverted: nothing was changed" if receipt is None else f"finished ({receipt.id})"
    verb = intent.kind.partition(".")[0]
    data = {"recovered": intent.id, "outcome": "reverted" if receipt is None else "finished"}
    talk = (receipt.left_over,) if receipt is not None and receipt.left_over else ()
    return CommandResult(text=f"{verb} {intent.id} {outcome}", data=data, talk=talk)
