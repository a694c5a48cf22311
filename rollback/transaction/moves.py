"""The visible part of a transaction: a list of renames, each atomic, that can be run again from any point.

Everything a transaction brings into sight is prepared beforehand; what remains are moves. A move knows the inode it
moves, so whoever runs the list after a crash sees which moves have been made: the thing is at its target, or it is
still at its source. Nothing is ever overwritten except a small file that is meant to be replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rollback.disk.durable import Disk, is_there
from rollback.errors import StoppedPartWay


class MoveKind(StrEnum):
    """How the target's name changes hands."""

    MOVE = "move"  # the target's name is free
    EXCHANGE = "exchange"  # source and target change places
    REPLACE = "replace"  # a small file takes the name of another
    DISCARD = "discard"  # out of sight, to be removed when all is done
    HIDDEN = "hidden"  # as EXCHANGE, on filesystems that cannot: by two renames while the whole root is out of sight


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenExchange:
    """Where things are while the root is out of sight: a loader that finds one checkpoint missing silently takes an
    older one, a missing root it reports.

        root -> hidden, hidden/name -> parked, source -> hidden/name, hidden -> root
    """

    hidden: Path
    parked: Path
    displaced_inode: int

    def to_json(self) -> list[Any]:
        return [str(self.hidden), str(self.parked), self.displaced_inode]

    @classmethod
    def from_json(cls, values: Any) -> HiddenExchange | None:
        return (
            None if values is None else cls(hidden=Path(values[0]), parked=Path(values[1]), displaced_inode=values[2])
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Bring the inode `inode` from `source` to `target`. Paths are absolute."""

    kind: MoveKind
    source: Path
    target: Path
    inode: int
    hidden: HiddenExchange | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "source": str(self.source),
            "target": str(self.target),
            "inode": self.inode,
            "hidden": None if self.hidden is None else self.hidden.to_json(),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Move:
        return cls(
            kind=MoveKind(record["kind"]),
            source=Path(record["source"]),
            target=Path(record["target"]),
            inode=int(record["inode"]),
            hidden=HiddenExchange.from_json(record["hidden"]),
        )

    def is_done(self) -> bool:
        """Whether the inode is at the target already; a discarded one need only be gone from its source."""
        if self.kind is MoveKind.DISCARD:
            return inode_of(self.source) != self.inode
        return inode_of(self.target) == self.inode


def inode_of(path: Path) -> int | None:
    """Inode number of `path` itself, `None` when nothing has that name."""
    try:
        return path.lstat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None


def run_moves(disk: Disk, moves: Sequence[Move]) -> None:
    """Make every move that is not made yet, in order, each durable before the next.

    Raises `StoppedPartWay` when a thing is neither at its source nor at its target: somebody else moved it.
    """
    for move in moves:
        if move.hidden is not None and inode_of(move.hidden.hidden) is not None:
            _exchange_hidden(disk, move, move.hidden)  # bring the root back before anything else is looked for in it
    for move in moves:
        if not move.is_done():
            if inode_of(move.source) != move.inode:
                raise StoppedPartWay(
                    f"`{move.source}` is not what it was when the transaction was prepared, and it is not at "
                    f"`{move.target}` either",
                    remedy="put it back where it was and run `chronicle recover`",
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
                f"cannot move `{move.source}` to `{move.target}`: something lies there already",
                remedy="move it away and run `chronicle recover`",
            )
        disk.move(move.source, move.target)


def _exchange_hidden(disk: Disk, move: Move, way: HiddenExchange) -> None:
    """Exchange by renames, from wherever an earlier attempt was stopped."""
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
    if root != way.hidden:  # else it was out of sight already, and stays so until everything is done
        disk.move(way.hidden, root)
