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
    REPLACE = "replace"  # a small file replaces another
    DISCARD = "discard"  # goes into the workspace, which is removed at the end
    HIDDEN = "hidden"  # EXCHANGE by two renames while the whole root is renamed, for filesystems without exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenExchange:
    """Paths used while the root is renamed. A loader reports a missing root, but takes an older checkpoint in silence.

        root -> hidden, hidden/name -> parked, source -> hidden/name, hidden -> root
    """

    hidden: Path
    parked: Path
    displaced_inode: int

    def to_json(self) -> list[Any]:
        """The form in `transaction.json`."""
        return [str(self.hidden), str(self.parked), self.displaced_inode]

    @classmethod
    def from_json(cls, values: Any) -> HiddenExchange | None:
        """The inverse of `to_json`; None stays None."""
        return (
            None if values is None else cls(hidden=Path(values[0]), parked=Path(values[1]), displaced_inode=values[2])
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Moves the inode `inode` from `source` to `target`. Paths are absolute."""

    kind: MoveKind
    source: Path
    target: Path
    inode: int
    hidden: HiddenExchange | None = None

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
            hidden=HiddenExchange.from_json(record["hidden"]),
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
        if move.hidden is not None and inode_of(move.hidden.hidden) is not None:
            _exchange_hidden(disk, move, move.hidden)  # the other moves look for files in the root
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
    if move.hidden is not None:
        _exchange_hidden(disk, move, move.hidden)
    elif move.kind is MoveKind.EXCHANGE:
        disk.exchange(move.source, move.target)
    elif move.kind is MoveKind.REPLACE:
        disk.replace(move.source, move.target)
    else:
        if is_there(move.target):
            raise StoppedPartWay(
                f"cannot move `{move.source}` to `{move.target}`: the target exists",
                remedy="move it away and run `chronicle recover`",
            )
        disk.move(move.source, move.target)


def _exchange_hidden(disk: Disk, move: Move, way: HiddenExchange) -> None:
    """Exchange by renames; continues wherever an earlier attempt stopped."""
    root = move.target.parent
    inside = way.hidden / move.target.name
    if inode_of(way.hidden) is None and root != way.hidden:
        disk.move(root, way.hidden)
        disk.sync_directory(root.parent)
    if inode_of(inside) == way.displaced_inode:
        disk.move(inside, way.parked)
        disk.sync_directory(way.parked.parent)
    if inode_of(inside) is None:
        disk.move(move.source, inside)
    disk.sync_directory(way.hidden)
    if root != way.hidden:  # else the whole transaction runs while the root is renamed
        disk.move(way.hidden, root)
