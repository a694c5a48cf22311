"""Quarantine moves strays out of the checkpoints directory, pruning deletes what rollbacks moved away.

Both are lists of renames, to `<root>/../quarantine/<id>/` and `<root>/../abandoned/<id>/`, and can be restored. It needs
no recovery: the journal entry with the moves is written first, any part of the moves is a safe state, and a second run
makes the others. Pruning cannot be undone; it renames each checkpoint away before it removes a file of it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollback.checkpoint.layout import Checkpoint
from rollback.disk.content import read_pointer
from rollback.disk.durable import REAL_DISK, Disk, is_mount_point, is_there
from rollback.errors import Refused, RollbackError, UnreadableFile
from rollback.plan.request import PointerEdit
from rollback.records import record_of
from rollback.transaction.change import workspace_of

QUARANTINE_DIR = "quarantine"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrayMove:
    """One stray: its path relative to the checkpoints directory, and its inode."""

    path: str
    inode: int

    def to_json(self) -> dict[str, object]:
        """The form in the journal entry."""
        return record_of(self)


def plan_quarantine(root: Path, checkpoints: Sequence[Checkpoint], beside: Sequence[str]) -> tuple[StrayMove, ...]:
    """The strays of `checkpoints` below `root` and those `beside` them, each once; a directory before its content."""
    root = Path(os.path.abspath(root))
    found: set[str] = set(beside)
    for checkpoint in checkpoints:
        for stray in checkpoint.strays:
            path = Path(os.path.normpath(checkpoint.folder / stray))
            if path.is_relative_to(root) and path != root:
                found.add(path.relative_to(root).as_posix())
    moves: list[StrayMove] = []
    for name in sorted(found):
        if not any(name.startswith(f"{move.path}/") for move in moves):
            moves.append(StrayMove(path=name, inode=os.lstat(root / name).st_ino))
    return tuple(moves)


def quarantine_dir(root: Path, id_: str) -> Path:
    """Where the quarantine with the journal entry `id_` keeps its strays."""
    return Path(os.path.abspath(root)).parent / QUARANTINE_DIR / id_


def refuse_mount_points(root: Path) -> None:
    """Raise `Refused` when `root` is a mount point: a rename cannot leave it."""
    root = Path(os.path.abspath(root))
    if is_mount_point(root):
        raise Refused(
            f"`{root}` is a mount point: nothing can be renamed out of it",
            "keep checkpoints one directory below the mount point, and name that with --checkpoints",
        )


def _whole(checkpoints: Sequence[Checkpoint], stay: Sequence[Checkpoint]) -> list[Path]:
    """The paths of checkpoints with their parts beside them, but for the parts that a checkpoint that stays needs."""
    needed = {one.path.parent / name for one in stay for name in one.names}
    return [path for one in checkpoints for name in one.names if (path := one.path.parent / name) not in needed]


def apply_moves(root: Path, where: Path, moves: Sequence[StrayMove], disk: Disk = REAL_DISK) -> int:
    """Make the moves from `root` to `where` that are not made yet; returns how many were made now.

    Raises `RollbackError` naming the first that fails; those before it stay made.
    """
    return _rename_all([(root / move.path, where / move.path, move.inode) for move in moves], disk)


def restore(root: Path, source: Path, moves: Sequence[StrayMove], disk: Disk = REAL_DISK) -> int:
    """Move back from `source` to `root`; returns how many were moved. Raises `Refused` instead of overwriting a file."""
    taken = [move.path for move in moves if is_there(root / move.path) and not _is(root / move.path, move.inode)]
    if taken:
        raise Refused(
            f"`{root / taken[0]}` exists: restoring would overwrite it",
            "move that file away first",
        )
    count = _rename_all([(source / move.path, root / move.path, move.inode) for move in moves], disk)
    for directory in sorted({(source / move.path).parent for move in moves}, key=lambda path: -len(path.parts)):
        _remove_empty(directory, source.parent.parent)
    return count


def point_elsewhere(root: Path, moves: Sequence[PointerEdit], disk: Disk = REAL_DISK) -> int:
    """Replace the pointers that still say what they said; returns how many. Raises `RollbackError` for the first that fails."""
    count = 0
    for move in moves:
        path = root / move.path
        try:
            if read_pointer(path) != move.before:
                continue  # somebody has written it since
            if move.is_link:
                beside = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
                disk.symlink(move.after, beside)
                disk.replace(beside, path)
                disk.sync_directory(root)
            else:
                disk.write_atomic(path, move.after)
        except OSError as problem:
            raise RollbackError(
                f"pointer `{path}` could not be changed to `{move.after.strip()}`: {problem.strerror}",
                "fix the cause, and write that name into it",
            ) from problem
        count += 1
    return count


def pointers_from_json(listed: Sequence[Mapping[str, object]]) -> tuple[PointerEdit, ...]:
    """The pointers of a journal entry."""
    return tuple(
        PointerEdit(
            path=str(item["path"]), before=str(item["before"]), after=str(item["after"]), is_link=bool(item.get("is_link"))
        )
        for item in listed
    )


def moves_from_json(listed: object) -> tuple[StrayMove, ...]:
    """The moves of a journal entry; raises `UnreadableFile` when it holds none."""
    if not isinstance(listed, list) or not all(isinstance(item, Mapping) for item in listed):
        raise UnreadableFile("the journal entry lists no moved strays")
    return tuple(StrayMove(path=str(item["path"]), inode=int(item["inode"])) for item in listed)


def _rename_all(pairs: Sequence[tuple[Path, Path, int]], disk: Disk) -> int:
    count = 0
    for source, target, inode in pairs:
        if not _is(source, inode):
            continue  # moved by an earlier run, or replaced by another file since
        try:
            disk.make_directory(target.parent)
            disk.move(source, target)
            for directory in {source.parent, target.parent}:
                disk.sync_directory(directory)
        except OSError as problem:
            raise RollbackError(
                f"`{source}` could not be moved to `{target}`: {problem.strerror}",
                "fix the cause and repeat the command; files that were already moved stay moved",
            ) from problem
        count += 1
    return count


def _is(path: Path, inode: int) -> bool:
    try:
        return os.lstat(path).st_ino == inode
    except OSError:
        return False


def _remove_empty(directory: Path, stop: Path) -> None:
    while directory != stop and directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()
        directory = directory.parent


# --- Pruning of abandoned checkpoints

KEEP_VERIFIED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """Checkpoints to delete, earliest step first, and those kept with the reason."""

    delete: tuple[Checkpoint, ...]
    kept: tuple[tuple[Checkpoint, str], ...]

    @property
    def size_bytes(self) -> int:
        """Bytes that the deletion frees."""
        return sum(checkpoint.size_bytes for checkpoint in self.delete)


def plan_prune(checkpoints: Sequence[Checkpoint], verified: Collection[Path], pinned: Collection[str]) -> PrunePlan:
    """Decide what to delete. `verified` are paths of checkpoints that passed, `pinned` ids of undoable rollbacks.

    Kept are the checkpoints that an undo needs, and enough others that two verified checkpoints remain. Pure.
    """
    abandoned = sorted((c for c in checkpoints if c.abandoned is not None), key=_order)
    reasons: dict[Path, str] = {
        c.path: f"undo of rollback {c.abandoned} needs it" for c in abandoned if c.abandoned in pinned
    }
    safe = sum(1 for c in checkpoints if c.path in verified and (c.abandoned is None or c.path in reasons))
    for checkpoint in reversed(abandoned):
        if safe >= KEEP_VERIFIED:
            break
        if checkpoint.path in verified and checkpoint.path not in reasons:
            reasons[checkpoint.path] = f"one of the last {KEEP_VERIFIED} verified checkpoints"
            safe += 1
    return PrunePlan(
        delete=tuple(c for c in abandoned if c.path not in reasons),
        kept=tuple((c, reasons[c.path]) for c in abandoned if c.path in reasons),
    )


def apply_prune(plan: PrunePlan, objects: Sequence[Path], *, parent: Path, id_: str, disk: Disk = REAL_DISK) -> None:
    """Delete the checkpoints of the plan, and the objects. Each checkpoint is renamed away before its files go."""
    workspace = workspace_of(parent, id_)
    disk.make_directory(workspace)
    for number, path in enumerate(dict.fromkeys(_whole(plan.delete, [kept for kept, _ in plan.kept]))):
        disk.move(path, workspace / f"{number}-{path.name}")
        disk.sync_directory(path.parent)
    for folder in sorted({checkpoint.path.parent for checkpoint in plan.delete}):
        if not any(folder.iterdir()):
            disk.remove_tree(folder)
    disk.remove_tree(workspace)
    disk.sync_directory(parent)
    for path in objects:
        if path.is_file():
            disk.unlink(path)


def _order(checkpoint: Checkpoint) -> tuple[int, str]:
    return checkpoint.step if checkpoint.step is not None else -1, str(checkpoint.path)
