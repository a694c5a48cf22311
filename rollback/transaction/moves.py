"""The visible part of a transaction: a list of atomic renames that can be repeated after an interruption.

All content is prepared beforehand. A move knows the inode it moves, so a second run after a crash sees which moves were
made: the inode is at its target, or still at its source. A move of kind REPLACE overwrites a small file; the others
never overwrite anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rollback.disk.durable import Disk, is_there
from rollback.errors import StoppedPartWay
from rollback.records import record_of


class MoveKind(StrEnum):
    """What a move does with its target."""

    MOVE = "move"  # nothing has the target's name
    EXCHANGE = "exchange"  # source and target exchange their names
    REPLACE = "replace"  # a file replaces another
    KEEP = "keep"  # the file at the source gets the target as a second name, before another replaces it
    DISCARD = "discard"  # goes into the workspace, which is removed at the end
    PARK = "park"  # out of sight: where two names cannot be exchanged, for a patch, or while a config changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Moves the inode `inode` from `source` to `target`. Paths are absolute.

    `aside`: where another program's save goes that has taken the name of the target meanwhile; None: that stops the moves.
    """

    kind: MoveKind
    source: Path
    target: Path
    inode: int
    aside: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """The form in `transaction.json`."""
        return record_of(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Move:
        """The inverse of `to_json`."""
        return cls(
            kind=MoveKind(record["kind"]),
            source=Path(record["source"]),
            target=Path(record["target"]),
            inode=int(record["inode"]),
            aside=None if record.get("aside") is None else Path(record["aside"]),
        )

    def is_done(self) -> bool:
        """Whether the inode is at the target. A discarded one only has to be gone from its source."""
        if self.kind is MoveKind.DISCARD:
            return inode_of(self.source) != self.inode
        return inode_of(self.target) == self.inode


def inode_of(path: Path) -> int | None:
    """Inode number of `path` itself (links are not followed), None when nothing has that name."""
    try:
        return path.lstat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None


def run_moves(disk: Disk, moves: Sequence[Move]) -> None:
    """Make the moves that are not made yet, in order, each durable before the next.

    Raises `StoppedPartWay` when an inode is neither at its source nor at its target: another program moved it.
    """
    for move in moves:
        if not move.is_done():
            if inode_of(move.source) != move.inode:
                raise StoppedPartWay(
                    f"`{move.source}` was moved or deleted by another program, and it is not at `{move.target}` either",
                    remedy="move it back and run `chronicle recover`",
                )
            _make(disk, move)
        for directory in dict.fromkeys((move.target.parent, move.source.parent)):
            if directory.is_dir():
                disk.sync_directory(directory)


def _make(disk: Disk, move: Move) -> None:
    if move.kind is MoveKind.EXCHANGE:
        disk.exchange(move.source, move.target)
    elif move.kind is MoveKind.REPLACE:
        disk.replace(move.source, move.target)
    elif move.kind is MoveKind.KEEP:
        disk.link(move.source, move.target)
    else:
        if is_there(move.target) and move.aside is not None and not is_there(move.aside):
            disk.make_directory(move.aside.parent)
            disk.move(move.target, move.aside)
        if is_there(move.target):
            raise StoppedPartWay(
                f"cannot move `{move.source}` to `{move.target}`: the target exists",
                remedy="move it away and run `chronicle recover`",
            )
        disk.move(move.source, move.target)
