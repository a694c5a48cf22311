"""`chronicle undo` takes back the last rollback; `chronicle recover` ends an interrupted one."""

from pathlib import Path
from typing import Annotated

import typer

from chronicle.cli.options import (
    CheckpointsOption,
    CommandResult,
    JsonOption,
    LogsOption,
    RunOption,
    YesOption,
    settings_with_checkpoints,
)
from chronicle.cli.transaction import Ground, agree, find_open_intent, find_undoable, open_ground, uninterrupted
from chronicle.journal import Entry
from rollback.checkpoint.listing import list_checkpoints
from rollback.transaction.protocol import Receipt
from rollback.transaction.protocol import recover_change as finish_or_revert
from rollback.transaction.protocol import undo_change as take_back

__all__ = [
    "recover",
    "undo",
]

def undo(
    rollback: Annotated[
        str | None, typer.Argument(help="Id of the rollback; the last one when left out.", show_default=False)
    ] = None,
    force: Annotated[
        str | None, typer.Option("--force", help="Go on though the run seems alive; say why.", metavar="REASON")
    ] = None,
    yes: YesOption = False,
    run: RunOption = None,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Take back the last rollback: bytes, modes and times of every touched file, later checkpoints brought back.

    Checkpoints saved since by a later launch are moved aside, never overwritten.

    Example: chronicle undo
    """
    settings = settings_with_checkpoints(run, logs, checkpoints)
    with open_ground(settings, force=force) as ground:
        entry = find_undoable(ground.journal.entries, rollback)
        if entry is None:
            return CommandResult(text="no rollback to undo", data={"changed": False})
        newer = _newer(ground, entry)
        text = _describe(entry, newer)
        agree("Undo it?", text, yes=yes)
        with uninterrupted():
            receipt = take_back(
                Receipt(id=entry.id, data=entry.data),
                newer=newer,
                objects_dir=ground.paths.objects_dir,
                record=ground.record,
            )
    data = {"changed": True, "receipt": receipt.id, "undone": entry.id, "abandoned": list(newer)}
    talk = (receipt.left_over,) if receipt.left_over else ()
    return CommandResult(text=f"{text}\n\ndone ({receipt.id})", data=data, talk=talk)


def _newer(ground: Ground, entry: Entry) -> tuple[str, ...]:
    """Checkpoints that a launch after the rollback saved, earliest first."""
    root = Path(entry.data["root"])
    present = list_checkpoints(root, include_abandoned=False)
    found = [c for c in present if c.path.name not in entry.data["remaining"]]
    return tuple(c.path.name for c in sorted(found, key=lambda c: (c.step is None, c.step or 0, c.path.name)))


def _describe(entry: Entry, newer: tuple[str, ...]) -> str:
    data = entry.data
    lines = [f"undo of {entry.title or 'rollback'} ({entry.id}, {entry.ts[:19]})", ""]
    lines += [f"  restore     {file['path'] or data['entry']}" for file in data["files"]]
    lines += [f"  bring back  {name}" for name in data["abandoned"]]
    lines += [f"  pointer     {pointer['path']}" for pointer in data["pointers"]]
    lines += [f"  move aside  {name}  (saved after the rollback)" for name in newer]
    return "\n".join(lines)


# --- chronicle recover


def recover(
    run: RunOption = None, logs: LogsOption = None, checkpoints: CheckpointsOption = None, json: JsonOption = False
) -> CommandResult:
    """Finish an interrupted rollback or undo, or revert it when nothing had changed yet. Twice is fine.

    Example: chronicle recover
    """
    settings = settings_with_checkpoints(run, logs, checkpoints)
    with open_ground(settings, recovering=True) as ground:
        intent = find_open_intent(ground.journal.entries)
        if intent is None:
            return CommandResult(text="nothing to recover", data={"recovered": None})
        with uninterrupted():
            receipt = finish_or_revert(intent.id, intent.data, record=ground.record)
    outcome = "reverted: nothing had been changed" if receipt is None else f"finished ({receipt.id})"
    verb = intent.kind.partition(".")[0]
    data = {"recovered": intent.id, "outcome": "reverted" if receipt is None else "finished"}
    talk = (receipt.left_over,) if receipt is not None and receipt.left_over else ()
    return CommandResult(text=f"{verb} {intent.id} {outcome}", data=data, talk=talk)
