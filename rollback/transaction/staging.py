"""Builds the edited copy of a checkpoint: unchanged files are hard links, edited files are new inodes.

The twin is built where no loader looks. It has the modes, owners, times and ACLs of the original.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollback.disk.content import sha256_of, sha256_unchanged
from rollback.disk.durable import Attributes, Disk, is_mount_point, mount_points
from rollback.errors import Refused
from rollback.records import record_of

LAST = "chronicle-manifest.json"  # written last, because it holds the digests of the other files

_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFile:
    """One file that differs between the original and its twin; `path` is relative to the checkpoint."""

    path: str
    before: str  # sha256
    after: str  # sha256
    attributes: Attributes  # of the original

    def to_json(self) -> dict[str, Any]:
        """The form stored in receipts."""
        return record_of(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> StagedFile:
        """The inverse of `to_json`."""
        return cls(
            path=record["path"],
            before=record["before"],
            after=record["after"],
            attributes=Attributes.from_json(record["attributes"]),
        )


def inside(checkpoint: Path, path: str) -> Path:
    """A file of the checkpoint; the checkpoint itself where it is one file, whose path in it is ""."""
    return checkpoint / path if path else checkpoint


# Arguments: the present file, the new file (it does not exist yet), the files written before it
Writer = Callable[[Path, Path, Sequence[StagedFile]], None]


def build_twin(
    disk: Disk, source: Path, twin: Path, writers: Mapping[str, Writer], *, linked: bool = True
) -> tuple[StagedFile, ...]:
    """Build `twin` from the directory or file `source`; all of it is durable when this returns.

    `writers` maps a path relative to `source` (empty when `source` is a file) to the function that writes it. Other files
    are hard links, or copies where `linked` is False.
    """
    changed: list[StagedFile] = []
    _copy(disk, source, twin, "", writers, changed, linked)
    disk.sync_directory(twin.parent)
    missing = set(writers) - {file.path for file in changed}
    assert not missing, f"writers for files that are not there: {missing}"
    return tuple(changed)


def refuse_odd_entries(source: Path, edited: Mapping[str, object]) -> None:
    """Raise `Refused` for a checkpoint with a mount point, a device file, or a symbolic link where a file is edited."""
    mounted = mount_points()
    for path in (source, *sorted(source.rglob("*"))):
        kind, relative = path.lstat().st_mode, path.relative_to(source).as_posix()
        if path != source and is_mount_point(path, mounted):
            raise Refused(
                f"`{path}` is a mount point inside the checkpoint: it cannot be hard-linked",
                remedy="unmount it, or copy its content",
            )
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind) or stat.S_ISLNK(kind)):
            raise Refused(f"`{path}` is neither a file nor a directory: expected state files only")
        if stat.S_ISLNK(kind) and (path == source or relative in edited):
            raise Refused(
                f"`{path}` is a symbolic link: editing it would change a file outside the checkpoint",
                remedy="replace the link by a copy of its target",
            )


def _copy(
    disk: Disk, source: Path, twin: Path, relative: str, writers: Mapping[str, Writer], changed: list[StagedFile],
    linked: bool,
) -> None:
    if relative in writers and not source.is_dir():
        changed.append(_write(disk, source, twin, relative, writers[relative], changed))
    elif source.is_dir() and not source.is_symlink():
        attributes = Attributes.of(source)
        disk.make_directory(twin)
        for entry in sorted(os.listdir(source), key=lambda name: (name == LAST, name)):
            _copy(disk, source / entry, twin / entry, f"{relative}/{entry}".lstrip("/"), writers, changed, linked)
        disk.sync_directory(twin)
        disk.set_attributes(twin, attributes)
    else:
        _link(disk, source, twin, linked)


def _write(
    disk: Disk, source: Path, twin: Path, relative: str, writer: Writer, changed: Sequence[StagedFile]
) -> StagedFile:
    attributes = Attributes.of(source)
    disk.point("open", twin)
    writer(source, twin, changed)
    made = Attributes.of(twin)
    disk.set_attributes(twin, replace(attributes, atime_ns=made.atime_ns, mtime_ns=made.mtime_ns))
    disk.sync_file(twin)
    return StagedFile(path=relative, before=sha256_unchanged(source), after=sha256_of(twin), attributes=attributes)


def _link(disk: Disk, source: Path, twin: Path, linked: bool) -> None:
    try:
        if not linked:
            raise OSError(errno.EMLINK, "copied")
        disk.link(source, twin)
    except OSError as problem:
        if problem.errno not in _NO_HARD_LINKS:
            raise
        attributes = Attributes.of(source)
        disk.copy_new(source, twin)
        disk.set_attributes(twin, attributes)
