"""`chronicle undo` takes back what changed something outside the journal; `chronicle recover` ends an interrupted rollback."""

from collections.abc import Sequence
from pathlib import Path

from chronicle import goback
from chronicle.cli.options import CHANGING, FORCING, Changing, CommandResult, Forcing, InRun
from chronicle.cli.transaction import agree
from chronicle.errors import Refusal
from chronicle.goback.applying import refuse_elsewhere, uninterrupted
from chronicle.goback.operations import Operation, find_operation, list_operations
from chronicle.journal import Entry, read_journal
from chronicle.journal.events import (
    EntryKind,
    Hardware,
    Note,
    Quarantined,
    QuarantineUndone,
    RollbackReceipt,
    find_open_transaction,
)
from chronicle.story.plain import format_when
from rollback.transaction.apply import newer_checkpoints


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
    chosen = None
    if listed:
        return _list(list_operations(read_journal(settings.paths).entries))
    if operation is not None:
        chosen = find_operation(read_journal(settings.paths).entries, operation)
        if chosen.stands:
            raise Refusal(f"`{chosen.title}` ({chosen.id}): {chosen.stands}", "`chronicle undo --list` says what can be undone")
        if chosen.entry.kind != EntryKind.ROLLBACK_RECEIPT:
            return _undo_other(chosen, at.of(settings))
    with goback.open_run(settings, force=at.force) as opened:
        entry = goback.find_undoable(opened.journal.entries)
        if entry is None:
            return CommandResult(lines="no rollback to undo", data={"changed": False})
        if chosen is not None and chosen.entry.id != entry.id:
            raise Refusal("another rollback was made meanwhile", "`chronicle undo --list` says what can be undone")
        refuse_elsewhere(opened, entry)
        newer = newer_checkpoints(entry.data) if opened.bucket is None else ()
        lines = _described(entry, newer)
        agree("Undo it?", lines, yes=at.yes)
        receipt = goback.undo(opened, entry, newer)
    data: dict[str, object] = {"changed": True, "receipt": receipt.id}
    if opened.bucket is None:
        data |= {"undone": entry.id, "abandoned": list(newer)}
    talk = (receipt.left_over,) if receipt.left_over else ()
    return CommandResult(lines=[*lines, "", f"done ({receipt.id})"], data=data, talk=talk)


def _described(entry: Entry, newer: tuple[str, ...]) -> list[str]:
    receipt = RollbackReceipt.of(entry)
    lines = [f"undo of {entry.title or 'rollback'} ({entry.id}, {format_when(entry.ts)})", ""]
    if receipt.store:
        lines.append(f"  pointer     {receipt.store['pointer']}")
        lines.append(f"  remove      {receipt.store['folder']}  (the copy that the rollback made)")
        return lines
    lines += [f"  restore     {file['path'] or receipt.entry}" for file in receipt.files]
    lines += [f"  move back   {name}" for name in receipt.abandoned]
    lines += [f"  pointer     {pointer['path']}" for pointer in receipt.pointers]
    lines += [f"  move aside  {name}  (saved after the rollback)" for name in newer]
    return lines


def _list(found: Sequence[Operation]) -> CommandResult:
    lines = []
    for one in found:
        lines.append(f"{one.id}  {format_when(one.entry.ts)}  {one.title}")
        lines.append(f"          {one.stands or f'chronicle undo {one.id}'}")
    rows = [
        {"id": one.entry.id, "time": one.entry.ts, "kind": one.entry.kind, "title": one.entry.title, "step": one.entry.step,
         "can_be_undone": not one.stands, "why_not": one.stands or None}
        for one in found
    ]  # fmt: skip
    return CommandResult(lines=lines or "nothing outside the journal was changed", data=rows)


def _undo_other(one: Operation, at: Changing) -> CommandResult:
    """Undo an operation that is no rollback, by the verb that did it."""
    why = f"undo of {one.id}"
    if one.entry.kind == EntryKind.QUARANTINE:
        return _move_back(one.entry, at)
    if one.entry.kind == EntryKind.HARDWARE:
        from chronicle.cli.hardware import exclude_node
        from chronicle.launch.admission import EXCLUDE

        said = Hardware.of(one.entry)
        return exclude_node(said.host or "", why, readmit=said.action == EXCLUDE, at=InRun(run=at.run, logs=at.logs))
    from chronicle.runs import mark_runs

    note = Note.of(one.entry)
    archived = None if note.archived is None else not note.archived
    mark_runs([at.settings().paths], tags=note.untags, untags=note.tags, archived=archived, why=why, undoes=one.entry.id)
    return CommandResult(lines=[f"undone: {one.entry.title}"], data={"changed": True, "undone": one.entry.id})


def _move_back(made: Entry, at: Changing) -> CommandResult:
    """Move what `verify --quarantine` or a restart moved away back to where it was; nothing is overwritten."""
    from rollback.transaction import cleanup

    event = Quarantined.of(made)
    root, moves = Path(event.root), cleanup.moves_from_json(list(event.moves))
    with goback.open_run(at.settings(), force=at.force) as opened:
        lines = ["strays to move back:", *(f"  {move.path}" for move in moves)]
        agree("Move them back?", lines, yes=at.yes)
        with uninterrupted():
            undone = QuarantineUndone(root=str(root))
            entry = opened.writer.write(undone, title=f"{len(moves)} strays moved back", refs=(made.id,))
            count = cleanup.restore(root, cleanup.quarantine_dir(root, made.id), moves)
            pointers = cleanup.pointers_from_json(event.pointers)
            cleanup.point_elsewhere(root, [pointer.reversed() for pointer in pointers])
    return CommandResult(lines=[*lines, "", f"done: {count} moved"], data={"changed": True, "id": entry.id, "moved": count})


def recover_transaction(at: Forcing = FORCING) -> CommandResult:
    """Finish or revert an interrupted rollback or undo.

    It is finished if it was fully prepared, else reverted. Running it again is safe.

    Example: chronicle recover
    """
    with goback.open_run(at.settings(), force=at.force, recovering=True) as opened:
        intent = find_open_transaction(opened.journal.entries)
        if intent is None:
            return CommandResult(lines="nothing to recover", data={"recovered": None})
        receipt = goback.recover(opened, intent)
    verb = intent.kind.partition(".")[0]
    if receipt is None:
        text, outcome = f"{verb} {intent.id} reverted: nothing was changed", "reverted"
    else:
        text, outcome = f"{verb} {intent.id} finished ({receipt.id})", "finished"
    talk = (receipt.left_over,) if receipt is not None and receipt.left_over else ()
    return CommandResult(lines=text, data={"recovered": intent.id, "outcome": outcome}, talk=talk)
