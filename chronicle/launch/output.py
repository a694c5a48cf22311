"""Printed output on its way: append-only log files, a live view that does not block, and the lines of a log that grows.

A log that cannot be written is reported once and counts the lost bytes. It tries again every ten seconds and marks the gap
when the disk has room again. The live view buffers at most a megabyte for a terminal that does not read (Ctrl-S, a pager).
"""

from __future__ import annotations

import os
import select
import stat
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import BinaryIO

RETRY_SECONDS = 10.0
ROTATE_BYTES = 256 << 20
BACKLOG_BYTES = 1 << 20
CHUNK_BYTES = select.PIPE_BUF  # a writable pipe accepts this many bytes without blocking
FILE_BYTES = 1 << 16  # at once to a file, which never blocks for a reader
TAIL_BYTES = 1 << 14
LONGEST_LINE_BYTES = 1 << 16


@dataclass
class LogFile:
    """One log file. `tail` holds the last 16 KiB, also when the disk was full; `lost_bytes` counts what was not written."""

    path: Path
    _: KW_ONLY
    complain: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    rotate_bytes: int = ROTATE_BYTES
    received: int = 0  # bytes that the launch printed, lost ones too
    lost_bytes: int = 0
    tail: bytes = b""
    _size: int = 0
    _parts: int = 0
    _fd: int | None = None
    _hole: int = 0
    _retry_at: float = 0.0

    def write(self, data: bytes, *, ours: bool = False) -> None:
        """Append. On an OSError count the bytes as lost and go on. With `ours` the data is not added to the tail."""
        if not ours:
            self.received += len(data)
            self.tail = (self.tail + data)[-TAIL_BYTES:]
        if self._hole and self.clock() < self._retry_at:
            self._lose(len(data))
            return
        try:
            if self._fd is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY
                self._fd = os.open(self.path, flags, 0o644)
            if self._hole:
                mark = f"\n[chronicle: {self._hole} bytes of this log were lost here]\n".encode()
                if os.write(self._fd, mark) != len(mark):
                    raise OSError("short write")
                self._hole = 0
            written = os.write(self._fd, data)
            if written < len(data):
                raise OSError(f"short write: {written} of {len(data)} bytes")
            self._size += written
            if self._size >= self.rotate_bytes:
                self._rotate()
        except OSError as error:
            if not self.lost_bytes:
                self.complain(f"cannot write `{self.path}`: {error.strerror or error}; the run continues without this log")
            self._lose(len(data))
            self._retry_at = self.clock() + RETRY_SECONDS

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def last_lines(self, count: int, *, start: int = 0, end: int | None = None) -> list[str]:
        """Return the last lines printed, without blank ones, at most 400 characters each.

        `start` and `end` choose a part, in bytes as `received` counts them.
        """
        before = self.received - len(self.tail)
        return _last_lines(self.tail[max(0, start - before) : None if end is None else max(0, end - before)], count)

    def _rotate(self) -> None:
        """Rename `rank-0.log` to `rank-0.0001.log` and start a new file."""
        self._parts += 1
        os.rename(self.path, part_of(self.path, self._parts))
        self.close()
        self._size = 0

    def _lose(self, size: int) -> None:
        self.lost_bytes += size
        self._hole += size


def part_of(log: Path, number: int) -> Path:
    """Where a part of a log lies that was full, counted from 1."""
    return log.with_name(f"{log.stem}.{number:04d}{log.suffix}")


class LiveView:
    """Non-blocking output to a terminal or pipe. Bytes it does not accept are buffered; above one megabyte they are skipped."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._waiting = bytearray()
        self._skipped = 0
        self._gone = False
        self._at_once = FILE_BYTES if _is_file(fd) else CHUNK_BYTES
        self._ready = select.poll()
        self._ready.register(fd, select.POLLOUT)

    @property
    def pending(self) -> bool:
        """Return whether bytes are buffered."""
        return bool(self._waiting)

    def show(self, data: bytes) -> None:
        """Buffer the data and write as much as possible."""
        if self._gone:
            return
        if len(self._waiting) + len(data) > BACKLOG_BYTES:
            self._skipped += len(data)
            return
        if self._skipped and not self._waiting:
            self._waiting += f"\n[chronicle: {self._skipped} bytes not shown; they are in supervisor.log]\n".encode()
            self._skipped = 0
        self._waiting += data
        self.flush()

    def flush(self) -> None:
        """Write buffered bytes for as long as the descriptor accepts them."""
        while self._waiting and not self._gone:
            try:
                if not self._ready.poll(0):
                    return
                del self._waiting[: os.write(self._fd, self._waiting[: self._at_once])]
            except BlockingIOError:
                return
            except OSError:  # the reader has closed the pipe (`chronicle run … | head`): the run goes on
                self._gone = True
                self._waiting.clear()


def _is_file(fd: int) -> bool:
    """Whether this is a file on a disk, or `/dev/null`."""
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode) or os.path.samestat(os.fstat(fd), os.stat(os.devnull))
    except OSError:
        return False


# --- Lines


class LineTail:
    """The lines appended to a file since the last look, also through the parts of a `LogFile`.

    A carriage return ends a line too. A missing file has no lines. A file that was cut or replaced, and has no parts, is read
    from its start. `part` and `offset` are where the next look begins: of the last line that was returned, its end.
    """

    def __init__(self, path: Path, *, part: int = 0, offset: int = 0) -> None:
        self.path = path
        self.part, self.offset = part, offset
        self._inode: int | None = None
        self._ahead = b""  # read, and not a whole line yet

    def read(self, most: int = 1 << 22) -> list[bytes]:
        """Lines without their ends; blank ones are left out. `most`: bytes that are read at once."""
        fresh = self._read_bytes(most)
        data = self._ahead + fresh
        *lines, self._ahead = data.replace(b"\r", b"\n").split(b"\n")
        if len(self._ahead) >= LONGEST_LINE_BYTES:
            lines.append(self._ahead)
            self._ahead = b""
        self.offset += len(data) - len(self._ahead)
        return [line for line in lines if line]

    def rest(self) -> bytes:
        """What stands at the end without the end of a line; it will not be returned again."""
        rest, self._ahead = self._ahead, b""
        self.offset += len(rest)
        return rest

    def _read_bytes(self, most: int) -> bytes:
        while True:
            full = part_of(self.path, self.part + 1)
            is_full = full.exists()
            try:
                with open(full if is_full else self.path, "rb") as log:
                    if not is_full and full.exists():
                        continue  # it was renamed before it was opened
                    data = self._read_from(log, most)
            except FileNotFoundError:
                return b""
            if data or not is_full:
                return data
            self.part += 1
            self.offset, self._ahead = 0, b""
            self._inode = None

    def _read_from(self, log: BinaryIO, most: int) -> bytes:
        inode = os.fstat(log.fileno()).st_ino
        size = log.seek(0, os.SEEK_END)
        if size < self.offset + len(self._ahead) or self._inode not in (None, inode):
            self.offset, self._ahead = 0, b""
        self._inode = inode
        log.seek(self.offset + len(self._ahead))
        return log.read(most)


def split_lines(waiting: bytes, data: bytes, *, final: bool = False) -> tuple[list[bytes], bytes]:
    """Return the complete lines and the incomplete rest. A carriage return (progress bars) also ends a line."""
    lines = (waiting + data).splitlines(keepends=True)  # bytes.splitlines splits at \r\n, \n and \r only
    rest = lines.pop() if lines and lines[-1][-1:] not in (b"\n", b"\r") else b""
    if rest and (final or len(rest) >= LONGEST_LINE_BYTES):
        return [*lines, rest + b"\n"], b""
    return lines, rest


def read_tail(path: Path, count: int = TAIL_BYTES) -> bytes:
    """The last bytes of a file; nothing where it cannot be read."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - count))
            return log.read()
    except OSError:
        return b""


def read_last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log that the trainer wrote; an empty list when it cannot be read."""
    return _last_lines(read_tail(path), count)


def _last_lines(data: bytes, count: int) -> list[str]:
    lines = data.replace(b"\r", b"\n").decode("utf-8", "replace").splitlines()
    return [line[:400] for line in lines if line.strip()][-count:]
