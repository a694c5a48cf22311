"""Disks that fail or die at a chosen operation, and a picture of a directory tree to compare before and after."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from rollback.disk.durable import Disk


class Killed(BaseException):
    """The process ends here: nothing after this may touch the disk."""


class DyingDisk(Disk):
    """Dies just before operation number `at`; half of a write is written. Counts all operations."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.count = 0
        self.dead = False
        self.last = ""

    def point(self, operation: str, path: Path) -> None:
        assert not self.dead, f"{operation} of {path} after the process was killed"
        self.count += 1
        self.last = f"{operation} {path.name}"
        if self.count == self.at:
            self.stop(operation, path)

    def stop(self, operation: str, path: Path) -> None:
        self.dead = True
        raise Killed

    def write_all(self, descriptor: int, content: bytes, path: Path) -> None:
        if self.count + 1 == self.at:
            os.write(descriptor, content[: len(content) // 2])
        super().write_all(descriptor, content, path)

    def write_at(self, descriptor: int, offset: int, content: bytes, path: Path) -> None:
        if self.count + 1 == self.at:
            os.pwrite(descriptor, content[: len(content) // 2], offset)
        super().write_at(descriptor, offset, content, path)


class FailingDisk(DyingDisk):
    """Answers operation number `at`, and only that one, with an error."""

    def __init__(self, at: int | None = None, code: int = errno.EIO) -> None:
        super().__init__(at)
        self.code = code

    def stop(self, operation: str, path: Path) -> None:
        raise OSError(self.code, os.strerror(self.code), str(path))


class Journal:
    """A journal in memory with the crash points that appending to a real one has."""

    def __init__(self, disk: DyingDisk | None = None) -> None:
        self.entries: list[tuple[str, str, dict[str, Any]]] = []
        self.disk = disk

    def record(self, kind: str, data: dict[str, Any]) -> str:
        if self.disk:
            self.disk.point("journal", Path(kind))
        entry = f"E{len(self.entries):03d}"
        self.entries.append((entry, kind, data))
        if self.disk:
            self.disk.point("journal", Path(f"{kind} written"))
        return entry

    def open_intents(self) -> list[tuple[str, dict[str, Any]]]:
        closed = {data.get("intent") for _, kind, data in self.entries if kind.endswith(".receipt")}
        return [(name, data) for name, kind, data in self.entries if kind.endswith(".intent") and name not in closed]

    def last(self, kind: str) -> tuple[str, dict[str, Any]]:
        return next((name, data) for name, its_kind, data in reversed(self.entries) if its_kind == kind)


def picture(top: Path, *, times: bool = True) -> dict[str, tuple[Any, ...]]:
    """Every entry below `top` with kind, mode, mtime and bytes."""
    seen: dict[str, tuple[Any, ...]] = {}
    for path in [top, *sorted(top.rglob("*"))]:
        found = path.lstat()
        content: Any = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = path.read_bytes()
        mtime = found.st_mtime_ns if times else None
        seen[path.relative_to(top).as_posix()] = (oct(found.st_mode), mtime, content)
    return seen
