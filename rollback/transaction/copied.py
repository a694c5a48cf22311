"""An unfinished transaction whose directories were copied: which of its moves were made before the copy was taken.

A move knows the inode that it moves (`moves`). A copy has other inodes, so nothing of it would be recognised. Here the inodes
are replaced by those of the copy. What was made is read from names: moves are made in a known order, each durable before the
next, so all moves before one that was made were made, and none after one that was not.

Names do not show whether two entries were exchanged. Then the digests of the edited files decide, or the size of a further copy
that the rollback wrote. Where neither tells, it cannot be decided and `StoppedPartWay` is raised: nothing is guessed.

A very large file that is patched in place has two names, in the checkpoint and in its twin. `cp -r` makes two files of it, so
the link is made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rollback.disk.content import sha256_of
from rollback.disk.durable import is_there, link_over
from rollback.errors import StoppedPartWay
from rollback.transaction.change import Prepared, hidden_root
from rollback.transaction.moves import Move, MoveKind, inode_of
from rollback.transaction.staging import inside


def in_this_copy(prepared: Prepared) -> Prepared:
    """The transaction with the inodes that its files have here. Its paths must be those of the copy already.

    Raises `StoppedPartWay` when the names and digests here do not tell how far it had come.
    """
    here = _Here(prepared)
    num_made = here.count_made()
    found = {index: here.made(prepared.moves[index]) for index in here.order[:num_made]}
    found |= {index: here.waiting(prepared.moves[index]) for index in here.order[num_made:]}
    here.link_patched()
    return replace(prepared, moves=tuple(found[index] for index in range(len(prepared.moves))))


class _Here:
    """The names in this copy, and what they will stand for while the remaining moves are made."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._root = Path(prepared.place).parent
        hidden = hidden_root(self._root, prepared.intent)
        self._hidden = hidden if is_there(hidden) else None
        self._inodes: dict[Path, int | None] = {}
        first = MoveKind.HIDDEN if prepared.hides_root else None  # `run_moves` makes these first while the root is renamed
        self.order = sorted(range(len(prepared.moves)), key=lambda index: prepared.moves[index].kind is not first)

    def count_made(self) -> int:
        """How many moves, in the order in which they are made, were made."""
        moves = [self._prepared.moves[index] for index in self.order]
        seen = [self._evidence(move) for move in moves]
        least = max((index + 1 for index, made in enumerate(seen) if made), default=0)
        most = min((index for index, made in enumerate(seen) if made is False), default=len(moves))
        if least > most:
            raise self._unclear(moves[most])
        while least < most and self._is_exchanged(moves[least]):
            least += 1
        return least

    def made(self, move: Move) -> Move:
        """A move that was made: its inode is what lies at the target now."""
        if move.kind is MoveKind.DISCARD:
            return replace(move, inode=-1)  # gone from its source is all that it has to be
        return self._with(move, self._at(move.target), None if move.hidden is None else self._at(move.hidden.parked))

    def waiting(self, move: Move) -> Move:
        """A move that is still to be made: its inode is what will lie at the source then."""
        if move.kind is MoveKind.DISCARD and self._at(move.source) is None:
            return replace(move, inode=-1)
        found, displaced = self._at(move.source), self._at(move.target)
        if move.hidden is not None:
            parked = self._at(move.hidden.parked)
            if parked is not None:  # interrupted between its renames
                found, displaced = (displaced if found is None else found), parked
        result = self._with(move, found, displaced)
        self._inodes[move.target] = found
        self._inodes[move.source] = displaced if move.kind is MoveKind.EXCHANGE else None
        return result

    def link_patched(self) -> None:
        """Give each patched file of the checkpoint its second name in the twin again."""
        place, twin = self._now(Path(self._prepared.place)), Path(self._prepared.twin)
        for file in self._prepared.patched if twin != Path(self._prepared.place) and is_there(twin) else ():
            one, other = inside(place, file.path), inside(twin, file.path)
            if one.is_file() and other.is_file() and not one.samefile(other):
                link_over(one, other)

    def _with(self, move: Move, inode: int | None, displaced: int | None) -> Move:
        if inode is None or (move.hidden is not None and displaced is None):
            raise self._unclear(move)
        hidden = None if move.hidden is None else replace(move.hidden, displaced_inode=displaced or 0)
        return replace(move, inode=inode, hidden=hidden)

    def _at(self, path: Path) -> int | None:
        return self._inodes[path] if path in self._inodes else inode_of(self._now(path))

    def _now(self, path: Path) -> Path:
        """Where the path is while the root may be renamed."""
        if self._hidden is None or not path.is_relative_to(self._root):
            return path
        return self._hidden / path.relative_to(self._root)

    def _evidence(self, move: Move) -> bool | None:
        """Whether the move was made, as the names alone tell; None when they do not."""
        source, target = is_there(self._now(move.source)), is_there(self._now(move.target))
        if not source and move.kind in (MoveKind.MOVE, MoveKind.REPLACE, MoveKind.DISCARD):
            return True if target else None
        if move.kind in (MoveKind.EXCHANGE, MoveKind.HIDDEN):
            if move.kind is MoveKind.HIDDEN:
                return not source
            return None if source else True
        return False

    def _is_exchanged(self, move: Move) -> bool:
        """Whether two names were exchanged, by the digests of the edited files. Raises where no digest tells."""
        if move.kind is MoveKind.DISCARD:
            return True  # neither at its source nor in the workspace: there was nothing to discard
        one, other = self._now(move.source), self._now(move.target)
        below = [(Path(path), digest) for path, digest in self._prepared.checks.items()]
        pairs = [(path.relative_to(move.target), digest) for path, digest in below if path.is_relative_to(move.target)]
        if not pairs and other.is_file():  # a further copy of a checkpoint that is one file
            final = self._now(Path(self._prepared.final))
            pairs = [(Path(), sha256_of(final))] if final.is_file() else []
        if pairs and _holds(other, pairs):
            return True
        if pairs and _holds(one, pairs):
            return False
        sizes = [path.stat().st_size if path.is_file() else None for path in (one, other)]
        if sizes[0] != sizes[1] and (size := self._size_of_copy(move.target)) in sizes:
            return size == sizes[1]
        raise self._unclear(move)

    def _size_of_copy(self, target: Path) -> int | None:
        """Size of the new file that a rollback puts there, if it is a further copy of the checkpoint."""
        copies = self._prepared.receipt.get("copies") or ()
        stamps = [copy["stamp"] for copy in copies if self._root / copy["name"] == target and "stamp" in copy]
        return int(stamps[0][0]) if stamps and stamps[0] else None

    def _unclear(self, move: Move) -> StoppedPartWay:
        return StoppedPartWay(
            f"it cannot be told in this copy whether `{move.source}` and `{move.target}` were already moved: "
            "nothing was changed",
            remedy="run `chronicle recover` in the run that this was copied from, then copy it again",
        )


def _holds(place: Path, pairs: Sequence[tuple[Path, str]]) -> bool:
    files = [(place / relative if relative.parts else place, digest) for relative, digest in pairs]
    return all(path.is_file() and sha256_of(path) == digest for path, digest in files)
