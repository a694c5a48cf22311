"""The moves of a transaction that also patches very large files in place, or changes a file outside the root with it:
done while the whole root is out of sight.

    root -> root.chronicle-<id>     a loader sees no checkpoints at all, which it reports; one missing it would pass over
    patch                           the old bytes are in `transaction.json` and in the object store; done twice is fine
    moves                           as ever, inside the hidden root
    root.chronicle-<id> -> root

A file is patched only where a copy would cost gigabytes: above a size, with one name, on a filesystem without reflinks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rollback.transaction.change import PatchedFile, Prepared
from rollback.disk.durable import Disk, is_there
from rollback.errors import StoppedPartWay
from rollback.transaction.moves import Move, run_moves


def hidden_root(root: Path, intent: str) -> Path:
    """The root's name while it is out of sight."""
    return root.with_name(f"{root.name}.chronicle-{intent}")


def run_out_of_sight(disk: Disk, prepared: Prepared) -> None:
    """Hide the root, patch, move, show the root; continues from wherever an earlier attempt was stopped."""
    place = Path(prepared.place)
    root, hidden = place.parent, hidden_root(place.parent, prepared.intent)
    if not is_there(hidden):
        if is_finished(prepared):
            return
        disk.move(root, hidden)
        disk.sync_directory(root.parent)
    for file in prepared.patched:
        _patch(disk, _find(file, hidden / place.name, Path(prepared.twin), Path(prepared.final)), file)
    run_moves(disk, [_inside(move, root, hidden) for move in prepared.moves])
    disk.move(hidden, root)
    disk.sync_directory(root.parent)


def is_finished(prepared: Prepared) -> bool:
    """Whether every move is made and every patch is in; the root must be in sight."""
    return all(move.is_done() for move in prepared.moves) and patched_at(Path(prepared.final), prepared)


def patched_at(checkpoint: Path, prepared: Prepared) -> bool:
    """Whether all large files of the checkpoint at this path have their new bytes."""
    return all(is_patched(checkpoint / file.path if file.path else checkpoint, file) for file in prepared.patched)


def is_patched(path: Path, file: PatchedFile) -> bool:
    """Whether the file has all the new bytes."""
    return path.is_file() and all(
        found == patch.new for found, patch in zip(_read(path, file), file.patches, strict=True)
    )


def _patch(disk: Disk, path: Path, file: PatchedFile) -> None:
    for found, patch in zip(_read(path, file), file.patches, strict=True):
        if any(byte not in pair for byte, *pair in zip(found, patch.old, patch.new, strict=True)):
            raise StoppedPartWay(
                f"`{path}` holds other bytes at {patch.offset} than before and after the edit",
                remedy="somebody else wrote to it; restore it from a copy, then run `chronicle recover`",
            )
    disk.overwrite(path, [(patch.offset, patch.new) for patch in file.patches])


def _read(path: Path, file: PatchedFile) -> Sequence[bytes]:
    with path.open("rb") as stream:
        descriptor = stream.fileno()
        return [os.pread(descriptor, len(patch.old), patch.offset) for patch in file.patches]


def _find(file: PatchedFile, *bases: Path) -> Path:
    """The file where it is at this point of the moves; a twin's is a hard link to the same inode."""
    for base in bases:
        path = base / file.path if file.path else base
        if path.is_file():
            return path
    raise StoppedPartWay(f"`{file.path or bases[0]}` is gone", remedy="put it back, then run `chronicle recover`")


def _inside(move: Move, root: Path, hidden: Path) -> Move:
    return replace(move, source=_mapped(move.source, root, hidden), target=_mapped(move.target, root, hidden))


def _mapped(path: Path, root: Path, hidden: Path) -> Path:
    return hidden / path.relative_to(root) if path.is_relative_to(root) else path
