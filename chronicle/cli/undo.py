"""`chronicle undo`: take back the last rollback, to the byte."""

from pathlib import Path
from typing import Annotated

import typer

from chronicle.cli.carrying_out import agree, uninterrupted
from chronicle.cli.options import CheckpointsOption, JsonOption, LogsOption, RunOption, YesOption
from chronicle.cli.recorded import settings_with_checkpoints
from chronicle.cli.result import CommandResult
from chronicle.journal import Entry
from chronicle.cli.transaction import Ground, open_ground
from chronicle.cli.history import find_undoable
from rollback.checkpoint.listing import list_checkpoints
from rollback.transaction.protocol import Receipt
from rollback.transaction.protocol import undo as take_back

__all__ = ["undo"]


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
