"""Read everything a launch prints, from pipes and sockets, and write it to logs and the live view.

    launcher ── pipe ──┬──────────────────────────> live view at once, supervisor.log by whole lines
                       └─ lines with a rank prefix > rank-<r>.log                (torchrun --tee, srun --label)
    rank r ── socket ── rank-<r>.log, and "[r] line" > live view, supervisor.log (`ranks.open_rank_output`)

One thread and one selector copy what pipes and sockets hold; `follower` reads what the lines say. Several pipes share a log:
the half of a line waits for its rest, or a second, so that no other line stands within it.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from chronicle.launch.output import LONGEST_LINE_BYTES, LiveView, LogFile, split_lines

READ_BYTES = 1 << 16
HELLO_BYTES = 4096
TEE_PREFIX = re.compile(rb"\[[^\]\d]{0,40}(\d+)\]:")
SRUN_PREFIX = re.compile(rb" *(\d+): ")


def rank_prefix_of(command: Sequence[str]) -> re.Pattern[bytes] | None:
    """Return the pattern of the rank prefix that this launcher writes; None when it writes none."""
    if Path(command[0]).name == "srun":
        return SRUN_PREFIX
    return TEE_PREFIX if any(word == "--tee" or word.startswith("--tee=") for word in command) else None


class Channels:
    """Pipes of the launcher and sockets of its ranks, read by the supervisor's loop."""

    def __init__(
        self,
        launch_dir: Path,
        selector: selectors.BaseSelector,
        *,
        complain: Callable[[str], None],
        rank_prefix: re.Pattern[bytes] | None = None,
        on_rank: Callable[[int, int], None],
        log_name: str,
    ) -> None:
        self._selector, self._rank_prefix = selector, rank_prefix
        self._on_rank = on_rank

        def open_log(name: str) -> LogFile:
            return LogFile(launch_dir / name, complain=complain)

        self._open_log = open_log
        self.log = self._open_log(log_name)
        self.rank_logs: dict[int, LogFile] = {}
        out = LiveView(1)
        self._views = (out, out if _same_file(1, 2) else LiveView(2))
        self._rest: dict[int, bytes] = {}
        self._halves: dict[int, bytes] = {}  # of lines, by pipe
        self._waiting: dict[int, bytes] = {}  # those of them that were there a look ago
        self._several_ranks = False
        self._open: dict[int, Callable[[], bool]] = {}
        self._listener: socket.socket | None = None

    def open_pipes(self) -> tuple[int, int]:
        """Return write ends for the launcher's stdout and stderr: one pipe for both when both views are the same file."""
        write_ends = []
        for view in dict.fromkeys(self._views):
            read_end, write_end = os.pipe()
            os.set_blocking(read_end, False)
            self._register(read_end, self._pipe_reader(read_end, view))
            write_ends.append(write_end)
        return write_ends[0], write_ends[-1]

    def listen(self, name: str) -> str | None:
        """Listen for ranks on an abstract socket; return its address, or None where the system has none."""
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            listener.bind(f"\0{name}")
            listener.listen(512)
        except OSError:
            return None
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        return f"@{name}"

    def drain(self) -> None:
        """Read the remaining bytes of all pipes and sockets after the last process ended."""
        for fd, read in list(self._open.items()):
            while read() and fd in self._open:
                pass
        for fd in list(self._open):
            self._write_half(fd)
            self._drop(fd)
        self.flush_views()

    def write_halves(self) -> None:
        """Write the halves of lines that have waited since the last call: a prompt, or a bar that does not move."""
        for fd, half in list(self._halves.items()):
            if self._waiting.get(fd) == half:
                self._write_half(fd)
        self._waiting = dict(self._halves)

    def flush_views(self) -> None:
        """Write buffered bytes to the live views without blocking."""
        for view in dict.fromkeys(self._views):
            if view.pending:
                view.flush()

    @property
    def waiting_views(self) -> list[LiveView]:
        """Return the live views that still have buffered bytes."""
        return [view for view in dict.fromkeys(self._views) if view.pending]

    @property
    def lost_bytes(self) -> int:
        """Return the number of bytes that could not be written to a log."""
        return self.log.lost_bytes + sum(log.lost_bytes for log in self.rank_logs.values())

    def say(self, text: str) -> None:
        """Write a line of chronicle itself to the live view and to the log."""
        data = f"chronicle: {text}\n".encode("utf-8", "replace")
        self._views[1].show(data)
        self.log.write(data, ours=True)

    def close(self) -> None:
        """Close listener and logs."""
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for log in (self.log, *self.rank_logs.values()):
            log.close()

    def _rank_log(self, rank: int) -> LogFile:
        if rank not in self.rank_logs:
            self.rank_logs[rank] = self._open_log(f"rank-{rank}.log")
        return self.rank_logs[rank]

    def _register(self, fd: int, read: Callable[[], bool]) -> None:
        self._open[fd] = read
        self._selector.register(fd, selectors.EVENT_READ, read)

    def _drop(self, fd: int) -> None:
        if self._open.pop(fd, None) is not None:
            self._selector.unregister(fd)
            os.close(fd)

    def _pipe_reader(self, fd: int, view: LiveView) -> Callable[[], bool]:
        """A function that reads once, so that a flood never keeps the loop from its signals; whether it read anything."""

        def read() -> bool:
            data = _read(fd)
            if data == b"":
                self._write_half(fd)
                self._drop(fd)
            if not data:
                return False
            view.show(data)
            self._write_lines(fd, data)
            if self._rank_prefix is not None:
                self._split_by_prefix(fd, data)
            return True

        return read

    def _write_lines(self, fd: int, data: bytes) -> None:
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if end:
            self.log.write(self._halves.pop(fd, b"") + data[:end])
        half = self._halves.pop(fd, b"") + data[end:]
        if half:
            self._halves[fd] = half
        if len(half) >= LONGEST_LINE_BYTES:
            self._write_half(fd)

    def _write_half(self, fd: int) -> None:
        half = self._halves.pop(fd, b"")
        if half:
            self.log.write(half)

    def _split_by_prefix(self, fd: int, data: bytes) -> None:
        assert self._rank_prefix is not None
        lines, self._rest[fd] = split_lines(self._rest.get(fd, b""), data)
        for line in lines:
            named = self._rank_prefix.match(line)
            if named is not None:
                self._rank_log(int(named.group(1))).write(line[named.end() :])

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        fd = connection.detach()
        self._register(fd, self._rank_reader(fd))

    def _rank_reader(self, fd: int) -> Callable[[], bool]:
        rank: int | None = None
        rest = b""

        def read() -> bool:
            nonlocal rank, rest
            data = _read(fd)
            if data == b"":
                if rank is not None:
                    self._show_rank(rank, split_lines(rest, b"", final=True)[0])
                self._drop(fd)
            if not data:
                return False
            if rank is None:
                rank, data = self._take_hello(rest + data)
                if rank is None:
                    rest = data
                    return True
                rest = b""
            self._rank_log(rank).write(data)
            lines, rest = split_lines(rest, data)
            self._show_rank(rank, lines)
            return True

        return read

    def _take_hello(self, data: bytes) -> tuple[int | None, bytes]:
        line, newline, after = data.partition(b"\n")
        if not newline and len(data) < HELLO_BYTES:
            return None, data
        try:
            hello = json.loads(line)
            rank, pid = int(hello["rank"]), int(hello["pid"])
            self._several_ranks |= rank > 0 or int(hello.get("world_size") or 1) > 1
        except (ValueError, KeyError, TypeError):
            return 0, data  # not our protocol: treat the bytes as output of rank 0
        self._rank_log(rank).write(b"")  # create the log, so that a rank that prints nothing has an empty one
        self._on_rank(rank, pid)
        return rank, after

    def _show_rank(self, rank: int, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        prefix = b"[%d] " % rank if self._several_ranks else b""
        data = b"".join(prefix + line for line in lines)
        self._views[0].show(data)
        self.log.write(data)


def _read(fd: int) -> bytes | None:
    """Read once: bytes, b"" at the end of the stream, None when nothing is available now."""
    try:
        return os.read(fd, READ_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _same_file(first: int, second: int) -> bool:
    try:
        one, two = os.fstat(first), os.fstat(second)
    except OSError:
        return False
    return (one.st_dev, one.st_ino) == (two.st_dev, two.st_ino)
