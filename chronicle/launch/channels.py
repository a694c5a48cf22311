"""Read everything a launch prints, from pipes and sockets, and write it to logs and the live view.

    launcher ── pipe ──┬──────────────────────────> live view, supervisor.log   (unchanged)
                       └─ lines with a rank prefix > rank-<r>.log                (torchrun --tee, srun --label)
    rank r ── socket ── rank-<r>.log, and "[r] line" > live view, supervisor.log (`ranks.open_rank_output`)

One thread and one selector read pipes and sockets.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from chronicle.launch.output import LiveView, LogFile, split_lines
from chronicle.launch.ranks import LATENCY_MARK

LIMIT_SECONDS = 2.0
LONGEST_MARK_BYTES = 128
MARK = LATENCY_MARK.encode()
ANNOUNCED = MARK + b"latency "
REST_OF_LINE = re.compile(rb"([0-9a-f]{8,64})\r?\n")


class LatencyTest:
    """Times the marked line of each rank. `late` maps a rank to its delay in seconds, None while the line is missing.

    A rank prints one marked line without flushing it and announces it over the socket. Seed 003 lost days to a relay that
    held lines back for 10 to 20 minutes. Marked lines are removed from the output.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[bytes, tuple[int, float]] = {}
        self._said: set[int] = set()
        self._early: set[bytes] = set()
        self._held: dict[int, bytes] = {}
        self.late: dict[int, float | None] = {}
        self.tested: set[int] = set()

    def expect(self, rank: int, mark: str) -> None:
        """Record that this rank has just printed the mark."""
        self.tested.add(rank)
        if mark.encode() in self._early:
            self._early.discard(mark.encode())
        else:
            self._waiting[mark.encode()] = (rank, self._clock())

    def take(self, data: bytes, stream: int) -> bytes:
        """Return the data without marked lines. An incomplete mark at the end is held back until its rest arrives."""
        data = self._held.pop(stream, b"") + data
        if MARK not in data:
            return data
        start = data.rfind(MARK)
        if b"\n" not in data[start:] and len(data) - start < LONGEST_MARK_BYTES:
            self._held[stream] = data[start:]
            data = data[:start]
        return self._take_out(data)

    def _take_out(self, data: bytes) -> bytes:
        """Remove complete marked lines by plain search, because a trainer may print megabytes without an end of line."""
        kept, done, start = [], 0, data.find(ANNOUNCED)
        while start >= 0:
            match = REST_OF_LINE.match(data, start + len(ANNOUNCED))
            if match is not None:
                self._arrived(match.group(1))
                kept.append(data[done : max(done, data.rfind(b"\n", done, start) + 1)])
                done = match.end()
            start = data.find(ANNOUNCED, start + 1)
        return b"".join([*kept, data[done:]])

    def check(self, say: Callable[[str], None]) -> None:
        """Report once per rank that its output is buffered."""
        for rank, printed_at in self._waiting.values():
            if rank not in self._said and self._clock() - printed_at > LIMIT_SECONDS:
                self._said.add(rank)
                self.late[rank] = None
                say(
                    f"output of rank {rank} is buffered: a line it printed has not arrived within {LIMIT_SECONDS:g} s; "
                    "find the program between trainer and supervisor that buffers it"
                )

    def _arrived(self, mark: bytes) -> None:
        if mark not in self._waiting:
            self._early.add(mark)  # the line can arrive before its announcement
            return
        rank, printed_at = self._waiting.pop(mark)
        if rank in self._said:
            self.late[rank] = round(self._clock() - printed_at, 1)


# --- Pipes and sockets

READ_BYTES = 1 << 16
READS_OF_WAITING = 16  # as much as a pipe of the largest usual size holds
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
        on_rotate: Callable[[Path], None],
        on_printed: Callable[[int, bytes], None],
        log_name: str,
    ) -> None:
        self._selector, self._rank_prefix = selector, rank_prefix
        self._on_rank, self._on_printed = on_rank, on_printed

        def open_log(name: str) -> LogFile:
            return LogFile(launch_dir / name, complain=complain, on_rotate=on_rotate)

        self._open_log = open_log
        self.log = self._open_log(log_name)
        self.rank_logs: dict[int, LogFile] = {}
        out = LiveView(1)
        self._views = (out, out if _same_file(1, 2) else LiveView(2))
        self._rest: dict[int, bytes] = {}
        self._several_ranks = False
        self._starts: dict[int, list[tuple[int, int]]] = {}  # of the processes that were a rank: pid, where its log stood
        self.latency = LatencyTest()
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
            self._drop(fd)
        self.flush_views()

    def read_waiting(self) -> None:
        """Read what was printed until now, at most what a pipe or socket holds. Not from within a callback of the selector."""
        for fd, read in list(self._open.items()):
            for _ in range(READS_OF_WAITING):
                if not read() or fd not in self._open:
                    break

    def last_lines_of(self, rank: int, pid: int, count: int) -> list[str]:
        """The last lines that this process printed as this rank; [] where the rank has no log of its own here."""
        if rank not in self.rank_logs:
            return []
        starts = self._starts.get(rank, [])
        place = next((place for place, (known, _) in enumerate(starts) if known == pid), None)
        if place is None:
            return self.rank_logs[rank].last_lines(count)  # a log split by the launcher's prefixes names no process
        end = starts[place + 1][1] if place + 1 < len(starts) else None
        return self.rank_logs[rank].last_lines(count, start=starts[place][1], end=end)

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
                self._drop(fd)
            if not data:
                return False
            data = self.latency.take(data, fd)
            view.show(data)
            self.log.write(data)
            self._on_printed(fd, data)
            if self._rank_prefix is not None:
                self._split_by_prefix(fd, data)
            return True

        return read

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
            data = self.latency.take(data, fd)
            if data:
                self._rank_log(rank).write(data)
                if rank == 0:
                    self._on_printed(fd, data)
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
        if hello.get("redirect", True):
            self._rank_log(rank).write(b"")  # create the log, so that a rank that prints nothing has an empty one
            self._starts.setdefault(rank, []).append((pid, self._rank_log(rank).received))
        if isinstance(hello.get("latency"), str):
            self.latency.expect(rank, hello["latency"])
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
