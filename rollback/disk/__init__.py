"""Durable and atomic writes, bounded reads, checksums, the lock and the object store.

Here is how a file is opened, on a disk or in a store: commands that read a few bytes of a log import no more than this.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["RemoteFile", "RemoteView", "open_file", "pread"]


class RemoteFile(int):
    """A descriptor of a file that stands for an object in a store (`rollback.disk.remote`): sized, but without bytes.

    `fetch(offset, count)` asks the store for a range and keeps it for the next reader, `prefetch` for many at once; `stream`
    keeps nothing.
    """

    fetch: Callable[[int, int], bytes]
    prefetch: Callable[[Sequence[tuple[int, int]]], None]
    stream: Callable[[int, int], bytes]


class RemoteView:
    """What opens the files that stand for objects; none is set unless a command was given the URL of a store."""

    opened: ClassVar[RemoteView | None] = None

    def open(self, path: Path) -> RemoteFile | None:
        """The descriptor of such a file; None for a path that is no part of the view."""
        raise NotImplementedError

    def mark(self, path: Path) -> tuple[str, ...] | None:
        """What tells two states of an object apart: ETag, generation, time; None for a path that is no part of the view."""
        raise NotImplementedError

    def shown(self, text: str) -> str:
        """`text` with the URL in place of the local path that stands for it."""
        raise NotImplementedError


def open_file(path: Path, flags: int = 0) -> int:
    """A descriptor to read from with `pread`. Does not wait for a pipe. Raises `OSError`."""
    found = RemoteView.opened.open(path) if RemoteView.opened is not None else None
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags) if found is None else found


def pread(fd: int, count: int, offset: int) -> bytes:
    """Up to `count` bytes at `offset`: `os.pread`, and the same for an object in a store."""
    return fd.fetch(offset, count) if isinstance(fd, RemoteFile) else os.pread(fd, count, offset)
