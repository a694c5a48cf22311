"""A small file read whole, without trust: a pipe or device in its place does not hang the reader, a huge one is not read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rollback.errors import UnreadableFile


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file (a link is followed) of at most `max_bytes`; raises UnreadableFile, or OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb", buffering=0) as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableFile(f"`{path}` is no regular file", "put the real file there, or remove it")
        if found.st_size > max_bytes:
            raise UnreadableFile(f"`{path}` has {found.st_size} bytes, more than {max_bytes}: it is not what its name says")
        return file.read(max_bytes)
