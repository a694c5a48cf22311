"""What must hold before a transaction is begun: refused here, nothing has been touched."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollback.transaction.change import Change, PatchedFile
from rollback.disk.durable import is_there
from rollback.errors import Refused
from rollback.disk.mounts import is_mount_point
from rollback.transaction.moves import inode_of
from rollback.disk.objects import sha256_of
from rollback.transaction.patched import is_patched
from rollback.transaction.staging import StagedFile, refuse_odd_entries


def check_ground(change: Change) -> None:
    """Refuse what could not be done whole: another filesystem, a mount point, a read-only parent, odd entries."""
    for path in (change.root, change.place, change.source):
        if is_there(path) and is_mount_point(path):
            raise Refused(
                f"`{path}` is a mount point: checkpoints cannot be moved aside on their own filesystem",
                remedy="let the setting `checkpoints` name a directory below the mount point",
            )
    if change.place.is_symlink():
        raise Refused(f"`{change.place}` is a symbolic link: expected a checkpoint", remedy="name the real directory")
    device = change.root.stat().st_dev
    for path in (change.parent, change.source, *(change.root / name for name in change.abandon)):
        if path.lstat().st_dev != device:
            raise Refused(
                f"`{path}` lies on another filesystem than `{change.root}`: it could not be moved in one piece",
                remedy="let the setting `checkpoints` name a directory whose parent is on the same filesystem",
            )
    for path in (change.parent, change.root, change.source.parent):
        if not os.access(path, os.W_OK | os.X_OK) or os.statvfs(path).f_flag & os.ST_RDONLY:
            raise Refused(
                f"`{path}` is not writable: the edited checkpoint is built and moved there",
                remedy="run as the user who owns the checkpoints, or make the directory writable",
            )
    for path in change.configs:
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise Refused(
                f"`{path.parent}` is not writable: `{path.name}` in it has to change together with the checkpoint",
                remedy="run as the user who owns it, or make the directory writable",
            )
    for name in change.copies:
        if not (change.root / name).is_file() or (change.root / name).is_symlink():
            raise Refused(f"`{change.root / name}` is no regular file: expected a copy of a checkpoint")
    for name in change.pointers:
        if (change.root / name).is_symlink():
            raise Refused(f"pointer `{change.root / name}` is a symbolic link: expected a small text file")
    refuse_odd_entries(change.source, {**change.writers, **change.patches})
    for name in change.patches:
        refuse_shared(change.source / name if name else change.source)


def refuse_shared(path: Path) -> None:
    """Refuse a file that has further names: patched in place, it would change under all of them."""
    found = path.lstat()
    if found.st_nlink != 1:
        raise Refused(
            f"`{path}` has {found.st_nlink} names (hard links): patching its {found.st_size} bytes in place would change "
            "the others too",
            remedy="give it its own copy first: `cp FILE FILE.part && mv FILE.part FILE`",
        )
    if not os.access(path, os.W_OK):
        raise Refused(f"`{path}` is not writable", remedy="run as the user who owns the checkpoints")


def check_undo(data: Mapping[str, Any], root: Path) -> None:
    place = root / data["entry"]
    if not is_there(place):
        raise Refused(
            f"`{place}` is gone: its edited files could be given back, the rest of it could not",
            remedy="the originals of the edited files are in the run's objects directory",
        )
    for name in data["abandoned"]:
        if inode_of(Path(data["abandoned_dir"]) / name) is None:
            raise Refused(
                f"`{Path(data['abandoned_dir']) / name}` is gone: the checkpoint that the rollback moved away cannot come back",
                remedy="it was pruned or moved by hand; put it back there, or leave the rollback as it is",
            )
    for config in data.get("configs") or ():
        path = Path(config["path"])
        if not path.is_file() or sha256_of(path) != config["after"]:
            raise Refused(
                f"`{path}` was changed after the rollback: expected the bytes that the rollback wrote",
                remedy="put back what the rollback wrote (kept in the run's objects directory), or do without the undo",
            )
    for file in map(StagedFile.from_json, data["files"]):
        path = place / file.path if file.path else place
        if not path.is_file() or sha256_of(path) != file.after:
            raise Refused(
                f"`{path}` was changed after the rollback: expected the bytes that the rollback wrote",
                remedy="abandon this checkpoint and go back to another one with `chronicle rollback --to`",
            )
    for patched in map(PatchedFile.from_json, data["patched"]):
        path = place / patched.path if patched.path else place
        if not is_patched(path, patched):
            raise Refused(
                f"`{path}` was changed after the rollback: expected the bytes that the rollback wrote",
                remedy="abandon this checkpoint and go back to another one with `chronicle rollback --to`",
            )
        refuse_shared(path)
    if not os.access(root.parent, os.W_OK | os.X_OK) or not os.access(root, os.W_OK | os.X_OK):
        raise Refused(f"`{root}` or its parent is not writable", remedy="run as the user who owns the checkpoints")
