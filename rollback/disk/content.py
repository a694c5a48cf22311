"""Reads files that may be malicious or huge, and many files in parallel.

A pipe or device in place of a file does not block the reader, and a huge file is refused by its size before it is read.
The files of a sharded checkpoint are read by several processes: the pickle reader is Python, so threads would not help.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rollback.errors import UnreadableFile


def disk_bytes(fd: int) -> int:
    """Bytes that the file occupies on disk, without holes; its size where the filesystem does not report blocks."""
    status = os.fstat(fd)
    return min(status.st_size, status.st_blocks * 512) if status.st_blocks else status.st_size


@contextmanager
def open_bounded(path: Path, max_bytes: int) -> Iterator[tuple[int, int]]:
    """(descriptor, size) of a regular file of at most `max_bytes`, links followed; raises `UnreadableFile` or `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableFile(f"`{path}` is not a regular file", "put the real file there, or remove it")
        if found.st_size > max_bytes:
            raise UnreadableFile(
                f"`{path}` has {found.st_size} bytes: expected at most {max_bytes}"
            )
        yield fd, found.st_size
    finally:
        os.close(fd)


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file of at most `max_bytes`; raises as `open_bounded`."""
    with open_bounded(path, max_bytes) as (fd, _), open(fd, "rb", buffering=0, closefd=False) as file:
        return file.read(max_bytes)


# --- Pointer files, such as DeepSpeed's `latest`

MAX_POINTER_BYTES = 4096  # the name of a directory has at most 255
POINTER_REMEDY = "write the name of a checkpoint into it, or remove it"


def read_pointer(path: Path) -> str | None:
    """The text of a pointer file or the target of a link, None when neither exists. Raises `UnreadableFile`."""
    return os.readlink(path) if path.is_symlink() else pointer_text(path)


def pointer_text(path: Path) -> str | None:
    """As `read_pointer`, but a link is followed."""
    if not path.is_file():
        return None
    try:
        text = read_bounded(path, MAX_POINTER_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise UnreadableFile(f"pointer `{path}` is not text: expected the name of a checkpoint", POINTER_REMEDY) from None
    if not text.strip().isprintable():
        raise UnreadableFile(f"pointer `{path}` has unprintable characters: expected the name of a checkpoint", POINTER_REMEDY)
    return text


# --- Many files at once

T = TypeVar("T")
R = TypeVar("R")

_ENOUGH_FILES = 48


def map_files(read: Callable[[T], R], jobs: Sequence[T]) -> list[R]:
    """`[read(job) for job in jobs]`, in several processes when there are many jobs; the first error is raised."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    if len(jobs) < _ENOUGH_FILES or cores < 2:
        return [read(job) for job in jobs]
    from concurrent.futures import ProcessPoolExecutor

    chunk = max(1, len(jobs) // (cores * 4))
    with ProcessPoolExecutor(max_workers=min(cores, 16)) as executor:
        return list(executor.map(read, jobs, chunksize=chunk))
