"""Strays shown, agreed to, moved aside and brought back: the changing half of `chronicle verify`."""

from collections.abc import Sequence
from pathlib import Path

from chronicle.cli.carrying_out import agree, uninterrupted
from chronicle.cli.result import CommandResult
from chronicle.errors import ChronicleError
from chronicle.cli.transaction import open_ground
from chronicle.settings import Settings
from rollback.errors import one_line
from rollback.checkpoint.layout import Checkpoint
from rollback.transaction.cleanup import (
    apply_quarantine,
    moves_from_json,
    plan_quarantine,
    quarantine_dir,
    refuse_mount_points,
)
from rollback.transaction.cleanup import restore as move_back

__all__ = ["bring_back", "move_strays"]

KIND, BACK = "quarantine", "quarantine.undone"


def move_strays(
    root: Path, chosen: Sequence[Checkpoint], beside: Sequence[str], settings: Settings, *, yes: bool
) -> CommandResult:
    """Move every stray below `root` out of it, journalled first. Raises `UsageProblem` when nobody can be asked."""
    moves = plan_quarantine(root, chosen, beside)
    if not moves:
        return CommandResult(text=f"no strays in {root}", data={"changed": False, "moved": []})
    refuse_mount_points(root)
    text = "\n".join(["strays to move out of the checkpoints:", *(f"  {one_line(move.path)}" for move in moves)])
    agree("Move them?", text, yes=yes)
    with open_ground(settings) as ground, uninterrupted():
        data = {"root": str(root), "moves": [move.to_json() for move in moves]}
        entry = ground.writer.append(KIND, title=f"{len(moves)} strays moved out of the checkpoints", data=data)
        apply_quarantine(root, entry.id, moves)
    where = quarantine_dir(root, entry.id)
    return CommandResult(
        text=f"{text}\n\ndone: they lie in {where}",
        data={"changed": True, "id": entry.id, "moved": [move.path for move in moves], "directory": str(where)},
        talk=(f"take it back with `chronicle verify --restore {entry.id}`",),
    )


def bring_back(wanted: str, settings: Settings, *, yes: bool) -> CommandResult:
    """Move the strays of one quarantine back to where they were."""
    with open_ground(settings) as ground:
        found = [entry for entry in ground.journal.of_kind(KIND) if wanted.upper() in (entry.id, entry.id[-len(wanted) :])]
        if len(found) != 1:
            raise ChronicleError(f"{len(found)} quarantines are called `{wanted}`", "`chronicle log` lists them")
        root, moves = Path(str(found[0].data["root"])), moves_from_json(found[0].data.get("moves"))
        text = "\n".join(["strays to bring back:", *(f"  {one_line(move.path)}" for move in moves)])
        agree("Bring them back?", text, yes=yes)
        with uninterrupted():
            entry = ground.writer.append(
                BACK, title=f"{len(moves)} strays brought back", refs=(found[0].id,), data={"root": str(root)}
            )
            count = move_back(root, found[0].id, moves)
    return CommandResult(text=f"{text}\n\ndone: {count} moved", data={"changed": True, "id": entry.id, "moved": count})
