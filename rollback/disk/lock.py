"""The lock file: one process at a time changes the checkpoints of a run; the file names that process.

`flock` is used where the filesystem supports it; the kernel releases it when the process ends. Elsewhere a file is
created exclusively. Such a file is taken over if its owner ran on this host, in this boot, and is gone; its age is not used.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rollback.disk.durable import named
from rollback.errors import Refused

_NO_FLOCK = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL})


class Locked(Refused):
    """Another process is changing this run's checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who holds a lock; `start_ticks` tells a process from a later one with the same number."""

    host: str
    boot_id: str
    pid: int
    start_ticks: int

    @classmethod
    def me(cls) -> Owner:
        """This process."""
        pid = os.getpid()
        return cls(host=socket.gethostname(), boot_id=_boot_id(), pid=pid, start_ticks=_start_ticks(pid) or 0)

    def is_gone(self) -> bool:
        """Whether the owner is known to be gone: same host, same boot, and no such process."""
        mine = Owner.me()
        if (self.host, self.boot_id) != (mine.host, mine.boot_id) or not self.boot_id:
            return False
        return _start_ticks(self.pid) != self.start_ticks


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path` for the duration of a block; raises `Locked` naming the owner when it is taken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if _flock(descriptor, path):
            _write_owner(descriptor, path)
            yield
            return
    finally:
        os.close(descriptor)
    with _exclusive_file(path.with_name(path.name + ".exclusive")):
        yield


def _flock(descriptor: int, path: Path) -> bool:
    """True when locked, False where the filesystem does not support flock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        if problem.errno in _NO_FLOCK:
            return False
        raise _locked(_read_owner(path), path, breakable=False) from None
    return True


@contextlib.contextmanager
def _exclusive_file(path: Path) -> Iterator[None]:
    for attempt in (1, 2):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            break
        except FileExistsError:
            owner = _read_owner(path)
            if attempt == 2 or owner is None or not owner.is_gone():
                raise _locked(owner, path, breakable=True) from None
            path.unlink(missing_ok=True)
    try:
        _write_owner(descriptor, path)
        os.close(descriptor)
        yield
    finally:
        path.unlink(missing_ok=True)


def _locked(owner: Owner | None, path: Path, *, breakable: bool) -> Locked:
    who = "another process" if owner is None else f"process {owner.pid} on {owner.host}"
    way = f"if that process is gone, remove `{path}`" if breakable else "wait for it to end"
    return Locked(f"{who} is changing the checkpoints of this run (lock `{path}`)", remedy=way)


def _write_owner(descriptor: int, path: Path) -> None:
    with named(path):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(Owner.me())).encode(), 0)


def _read_owner(path: Path) -> Owner | None:
    try:
        return Owner(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, `None` when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])
