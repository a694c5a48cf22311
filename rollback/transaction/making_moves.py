"""The moves of a transaction made from what they are to do, their files written and durable before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rollback.disk.durable import Attributes, Disk, is_there
from rollback.errors import Refused
from rollback.transaction.moves import HiddenExchange, Kind, Move, inode_of
from rollback.disk.objects import ObjectStore


def swap_moves(root: Path, one: Path, place: Path, workspace: Path, disk: Disk, *, leftover: Path | None) -> list[Move]:
    """Moves that put `one` at `place` and what was there at `leftover` (`None`: left in the workspace).

    Where the filesystem cannot exchange two names, the whole root goes out of sight for two renames.
    """
    there = inode_of(place)
    assert there is not None
    if disk.can_exchange(workspace):
        moves = [move_of(one, place, Kind.EXCHANGE)]
        return moves if leftover is None else [*moves, Move(kind=Kind.MOVE, source=one, target=leftover, inode=there)]
    parked = leftover or workspace / "parked" / place.name
    disk.make_directory(parked.parent)
    way = HiddenExchange(hidden=root.with_name(f"{root.name}{workspace.name}"), parked=parked, displaced_inode=there)
    return [replace(move_of(one, place, Kind.HIDDEN), hidden=way)]


def relinking_move(disk: Disk, prepared: Path, path: Path, points_to: str) -> Move:
    disk.symlink(points_to, prepared)
    disk.sync_directory(prepared.parent)
    return move_of(prepared, path, Kind.REPLACE)


def move_of(source: Path, target: Path, kind: Kind = Kind.MOVE) -> Move:
    inode = inode_of(source)
    if inode is None:
        raise Refused(f"`{source}` is not there any more", remedy="plan again with `chronicle rollback --dry-run`")
    return Move(kind=kind, source=source, target=target, inode=inode)


def discard_move(source: Path, trash: Path, disk: Disk) -> Move:
    disk.make_directory(trash.parent)
    return move_of(source, trash, Kind.DISCARD)


def replacement_move(disk: Disk, prepared: Path, target: Path, content: bytes) -> Move:
    disk.write_new(prepared, content)
    disk.sync_directory(prepared.parent)
    return move_of(prepared, target, Kind.REPLACE)


def kept_for_undo(path: Path, store: ObjectStore) -> dict[str, Any]:
    """Put the present content of a small file into the store; what `undo` needs to bring it back."""
    if not is_there(path):
        return {"before": None, "attributes": None}
    return {"before": store.add_bytes(path.read_bytes()), "attributes": Attributes.of(path).to_json()}


def stamp_of(path: Path) -> list[int] | None:
    """What tells whether a file is still the one that was written, without reading it."""
    found = path.lstat() if is_there(path) else None
    return None if found is None else [found.st_size, found.st_mtime_ns]
