"""`chronicle undo` undoes the last rollback; `chronicle recover` finishes or reverts an interrupted one."""

from functools import partial
from typing import Annotated

import typer

from chronicle.cli.options import (
    CheckpointsOption,
    CommandResult,
    ForceOption,
    JsonOption,
    LogsOption,
    RunOption,
    YesOption,
    settings_with_checkpoints,
)
from chronicle.cli.transaction import agree, find_undoable, open_run, uninterrupted
from chronicle.journal import Entry
from chronicle.journal.events import RollbackReceipt, find_open_transaction
from chronicle.story.plain import format_when
from rollback.transaction.apply import newer_checkpoints
from rollback.transaction.protocol import Receipt, recover_change, undo_change

__all__ = [
    "recover_transaction",
    "undo_rollback",
]

def undo_rollback(
    rollback: Annotated[
        str | None, typer.Argument(help="Id of the rollback. Without it, the last one.", show_default=False)
    ] = None,
    force: ForceOption = None,
    yes: YesOption = False,
    run: RunOption = None,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Undo the last rollback, byte for byte.

    Bytes, modes and times of the edited files are restored, and later checkpoints are moved back. Checkpoints that a
    later launch saved are moved to `abandoned/`, never overwritten.

    Example: chronicle undo
    """
    settings = settings_with_checkpoints(run, logs, checkpoints)
    if settings.checkpoints_url is not None:
        from chronicle.cli.in_store import undo_store  # only where the checkpoints are in a store

        return undo_store(settings, rollback, force=force, yes=yes)
    with open_run(settings, force=force) as opened:
        entry = find_undoable(opened.journal.entries, rollback)
        if entry is None:
            return CommandResult(text="no rollback to undo", data={"changed": False})
        opened.refuse_outside(entry)
        opened.refuse_shared(entry)
        newer = newer_checkpoints(entry.data)
        text = _describe(entry, RollbackReceipt.of(entry), newer)
        agree("Undo it?", text, yes=yes)
        opened = opened.finishing(entry)
        with uninterrupted():
            receipt = undo_change(
                Receipt(id=entry.id, data=entry.data),
                newer=newer,
                objects_dir=opened.paths.objects_dir,
                record=opened.record,
            )
    data = {"changed": True, "receipt": receipt.id, "undone": entry.id, "abandoned": list(newer)}
    talk = (receipt.left_over,) if receipt.left_over else ()
    return CommandResult(text=f"{text}\n\ndone ({receipt.id})", data=data, talk=talk)


def _describe(entry: Entry, receipt: RollbackReceipt, newer: tuple[str, ...]) -> str:
    lines = [f"undo of {entry.title or 'rollback'} ({entry.id}, {format_when(entry.ts)})", ""]
    lines += [f"  restore     {file['path'] or receipt.entry}" for file in receipt.files]
    lines += [f"  move back   {name}" for name in receipt.abandoned]
    lines += [f"  pointer     {pointer['path']}" for pointer in receipt.pointers]
    lines += [f"  move aside  {name}  (saved after the rollback)" for name in newer]
    return "\n".join(lines)


# --- chronicle recover


def recover_transaction(
    force: ForceOption = None,
    run: RunOption = None,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Finish or revert an interrupted rollback or undo.

    It is finished if it was fully prepared, else reverted. Running it again is safe.

    Example: chronicle recover
    """
    settings = settings_with_checkpoints(run, logs, checkpoints)
    if settings.checkpoints_url is not None:
        from chronicle.cli.in_store import recover_store  # only where the checkpoints are in a store

        return recover_store(settings, force=force)
    with open_run(settings, force=force, recovering=True) as opened:
        intent = find_open_transaction(opened.journal.entries)
        if intent is None:
            return CommandResult(text="nothing to recover", data={"recovered": None})
        opened.refuse_unknown_place(intent)
        opened.refuse_shared(intent)
        opened = opened.finishing(intent)
        with uninterrupted():
            receipt = recover_change(intent.id, intent.data, record=opened.record, moved=partial(opened.prepared_here, intent))
    outcome = "reverted: nothing was changed" if receipt is None else f"finished ({receipt.id})"
    verb = intent.kind.partition(".")[0]
    data = {"recovered": intent.id, "outcome": "reverted" if receipt is None else "finished"}
    talk = (receipt.left_over,) if receipt is not None and receipt.left_over else ()
    return CommandResult(text=f"{verb} {intent.id} {outcome}", data=data, talk=talk)
