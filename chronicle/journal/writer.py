"""Append entries: one file per writer, one `os.write` per line, sha256 chain, fsync.

No lock: nobody else ever writes this file, so it works on NFS and Lustre (`docs/design.md` §5.1). A line that could
not be written whole (full disk) is cut off again; when even that fails the next append begins a new line, and the
reader names the torn one.
"""

import hashlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from chronicle.errors import JournalError
from chronicle.journal.entries import FIRST_PREV, Entry
from chronicle.paths import RunPaths

__all__ = ["JournalWriter", "new_id"]

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford base 32, as ULIDs use it


def new_id(moment: datetime, randomness: int) -> str:
    """A ULID: sorts by time, unique without coordination. `randomness` has 80 bits."""
    number = (int(moment.timestamp() * 1000) << 80) | randomness
    return "".join(ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5))


class JournalWriter:
    """Writes one file `<journal>/<utc>-<host>-<pid>-<hex>.jsonl`, created with the first entry."""

    def __init__(
        self,
        paths: RunPaths,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        host: str | None = None,
        pid: int | None = None,
        randomness: Callable[[int], int] = secrets.randbits,
    ) -> None:
        self.paths = paths
        self._clock = clock
        self._host = (host or socket.gethostname()).split(".")[0]
        self._pid = os.getpid() if pid is None else pid
        self._randomness = randomness
        self._fd: int | None = None
        self._owner_pid = os.getpid()
        self._seq = 0
        self._prev = FIRST_PREV
        self._last_moment: datetime | None = None
        self._torn = False
        self._lock = threading.RLock()
        self.writer = ""

    def append(
        self,
        kind: str,
        *,
        step: int | None = None,
        launch: int | None = None,
        title: str = "",
        refs: Sequence[str] = (),
        data: Mapping[str, Any] | None = None,
    ) -> Entry:
        """Write one entry durably and return it; raises `JournalError` when it is not on disk."""
        with self._lock:
            moment = self._now()
            try:
                fd = self._open(moment)
                entry = Entry(
                    id=new_id(moment, self._randomness(80)),
                    ts=moment.isoformat(timespec="milliseconds"),
                    run=self.paths.run,
                    writer=self.writer,
                    seq=self._seq,
                    prev=self._prev,
                    kind=kind,
                    step=step,
                    launch=launch,
                    title=title,
                    refs=tuple(refs),
                    data=data or {},
                )
                line = entry.to_json().encode("utf-8", "replace")
                self._write(fd, line)
            except OSError as problem:
                raise JournalError(
                    f"cannot write to the journal `{self.paths.journal_dir}`: {problem.strerror or problem}",
                    "free space or fix the permissions, then repeat the command",
                ) from problem
            self._seq += 1
            self._prev = hashlib.sha256(line).hexdigest()
            return entry

    def close(self) -> None:
        """Release the file; a later append would start a new one."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def __enter__(self) -> "JournalWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _now(self) -> datetime:
        """The clock, never running backwards within one writer."""
        moment = self._clock()
        if self._last_moment is not None and moment < self._last_moment:
            moment = self._last_moment
        self._last_moment = moment
        return moment

    def _open(self, moment: datetime) -> int:
        if self._fd is not None and self._owner_pid == os.getpid():
            return self._fd
        directory = self.paths.journal_dir
        directory.mkdir(parents=True, exist_ok=True)
        pid = self._pid if self._owner_pid == os.getpid() else os.getpid()  # a forked child writes its own file
        self._owner_pid = os.getpid()
        stamp = moment.astimezone(UTC).strftime("%Y%m%dT%H%M%S")
        self.writer = f"{stamp}-{self._host}-{pid}-{self._randomness(16):04x}"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(directory / f"{self.writer}.jsonl", flags, 0o644)
        self._seq, self._prev, self._torn = 0, FIRST_PREV, False
        _fsync_dir(directory)
        return self._fd

    def _write(self, fd: int, line: bytes) -> None:
        size = os.fstat(fd).st_size
        record = (b"\n" if self._torn else b"") + line + b"\n"
        written = os.write(fd, record)
        if written != len(record):
            self._cut(fd, size)
            raise OSError(28, os.strerror(28))  # a short write to a file means the disk is full
        self._torn = False
        os.fsync(fd)

    def _cut(self, fd: int, size: int) -> None:
        try:
            os.ftruncate(fd, size)
        except OSError:
            self._torn = True


def _fsync_dir(directory: os.PathLike[str]) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
