"""A new file put together from new bytes and ranges of an old one, copied inside the kernel, never through memory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from rollback.errors import UnreadableFile

FICLONE = 0x40049409

Piece = bytes | range  # new bytes, or a range of bytes copied from the old file


def write_new(destination: Path, source: Path, pieces: Sequence[Piece], source_fd: int) -> None:
    """Write `pieces` to `destination`, which must not exist, with the mode of `source`; fsynced when this returns."""
    mode = os.stat(source).st_mode & 0o7777
    fd = os.open(destination, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.fchmod(fd, mode)
        cloned = source_fd >= 0 and _clone(source_fd, fd)
        at = 0
        for piece in pieces:
            if isinstance(piece, bytes):
                _write_all(fd, piece, at)
                at += len(piece)
            elif not cloned or piece.start != at:
                at = _copy_range(source_fd, fd, piece, at)
            else:
                at += len(piece)
        os.ftruncate(fd, at)
        os.fsync(fd)
    finally:
        os.close(fd)


def _clone(source_fd: int, fd: int) -> bool:
    """Share the source's blocks where the filesystem can (btrfs, xfs); ext4 and most others cannot."""
    try:
        fcntl.ioctl(fd, FICLONE, source_fd)
    except OSError:
        return False
    return True


def _write_all(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def _copy_range(source_fd: int, fd: int, piece: range, at: int) -> int:
    """Copy inside the kernel; returns the position behind the last byte."""
    os.lseek(fd, at, os.SEEK_SET)
    offset, left = piece.start, len(piece)
    while left:
        sent = os.sendfile(fd, source_fd, offset, min(left, 2**30))
        if not sent:
            raise UnreadableFile(f"file ends at byte {offset}: it became shorter while it was copied")
        offset, left = offset + sent, left - sent
    return at + len(piece)
