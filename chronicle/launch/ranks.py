"""Ranks of a launch: how a rank reports itself to the supervisor, and which rank ended first.

The first part runs inside the trainer: standard library only. The second part runs in the supervisor. A pidfd per rank
gives the order of deaths although the ranks are not children of the supervisor.
"""

from __future__ import annotations

import io
import json
import os
import selectors
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from chronicle.launch.processes import read_environment, read_exit_code, walk_children

__all__ = [
    "OUTPUT_VARIABLE",
    "RankDeath",
    "RankWatch",
    "open_rank_output",
    "rank_of",
]

OUTPUT_VARIABLE = "CHRONICLE_OUTPUT"
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
LATENCY_MARK = "\x1e"  # ASCII record separator: marks the line whose arrival is timed


def rank_of(environ: Mapping[str, str]) -> int | None:
    """Return this process's global rank from the launcher's variables; None outside a process group."""
    for name in RANK_VARIABLES:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def open_rank_output(
    rank: int | None = None, *, environ: Mapping[str, str] = os.environ, redirect: bool = True
) -> bool:
    """Send stdout and stderr of this process to the supervisor as this rank's output; return whether they are sent.

    The rank's output becomes a socket to the supervisor on the same node, which writes `rank-<r>.log` and shows the lines.
    A socket instead of a file: a full disk then costs log lines and does not make `print` raise in the trainer. Without
    `chronicle run`, or when the socket cannot be reached, output stays where it is.

    Also sets both streams to line buffering without write-through: `python -u` writes one `print` in pieces, which mixes
    lines of several ranks (measured: 4,672 of 6,000). With `redirect=False` the output stays with the launcher and only
    the latency test is made: one marked line, printed and not flushed, whose arrival is timed.
    """
    if redirect:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True, write_through=False)
    address = environ.get(OUTPUT_VARIABLE)
    if not address:
        return False
    number = rank if rank is not None else rank_of(environ)
    return _connect(address, 0 if number is None else number, environ, redirect)


def _connect(address: str, rank: int, environ: Mapping[str, str], redirect: bool) -> bool:
    mark = os.urandom(8).hex()
    hello = {"v": 1, "rank": rank, "pid": os.getpid(), "world_size": environ.get("WORLD_SIZE")}
    hello |= {"redirect": redirect, "latency": mark}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        try:
            line.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
            line.sendall(json.dumps(hello).encode() + b"\n")
        except OSError:
            return False  # another network namespace, or the supervisor is gone: keep the launcher's streams
        sys.stdout.flush()
        sys.stderr.flush()
        if redirect:
            os.dup2(line.fileno(), 1)
            os.dup2(line.fileno(), 2)
    print(f"{LATENCY_MARK}latency {mark}")
    return redirect


# --- In the supervisor: which process is which rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDeath:
    """One rank's process ended; `time` is monotonic seconds.

    `code` is its exit code, negative for a signal; None where its launcher had waited for it before we looked.
    """

    rank: int
    pid: int
    time: float
    code: int | None = None


class RankWatch:
    """Ranks of one launch on this host."""

    def __init__(self, selector: selectors.BaseSelector, *, clock: Callable[[], float]) -> None:
        self._selector = selector
        self._clock = clock
        self._handles: dict[int, int] = {}  # rank -> pidfd
        self._known: set[tuple[int, int]] = set()
        self.pids: dict[int, int] = {}
        self.deaths: list[RankDeath] = []

    def add(self, rank: int, pid: int) -> None:
        """Record that process `pid` is rank `rank`. Repeated calls change nothing."""
        if self.pids.get(rank) == pid:
            return
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            return
        if rank in self._handles:  # the launcher restarted its group: use the new process
            self._close(rank)
        self.pids[rank] = pid
        self._handles[rank] = handle
        self._selector.register(handle, selectors.EVENT_READ, lambda: self._ended(rank, pid))

    def look(self) -> list[tuple[int, int]]:
        """Find ranks by their environment; return the living process tree as (pid, start ticks)."""
        tree = walk_children(os.getpid())
        rank_by_pid: dict[int, int] = {}
        for process in tree:
            if process.key in self._known or not process.alive:
                continue
            environment = read_environment(process.pid)
            rank = None if environment is None else rank_of(environment)
            if rank is None:
                continue
            rank_by_pid[process.pid] = rank
            # children of a rank inherit its number: only the topmost process is the rank
            if rank_by_pid.get(process.parent) != rank and process.parent not in self.pids.values():
                self.add(rank, process.pid)
            self._known.add(process.key)
        return [process.key for process in tree if process.alive]

    def first_death(self) -> RankDeath | None:
        """Return the rank that ended first; None when no rank has ended."""
        return min(self.deaths, key=lambda death: death.time) if self.deaths else None

    def collect(self) -> None:
        """Record ranks that have ended since the last event."""
        for key, _ in self._selector.select(0):
            if key.fd in self._handles.values():
                key.data()

    def close(self) -> None:
        """Close all pidfds."""
        for rank in list(self._handles):
            self._close(rank)

    def _ended(self, rank: int, pid: int) -> None:
        self.deaths.append(RankDeath(rank=rank, pid=pid, time=self._clock(), code=read_exit_code(pid)))
        self._close(rank)

    def _close(self, rank: int) -> None:
        handle = self._handles.pop(rank)
        self._selector.unregister(handle)
        os.close(handle)
