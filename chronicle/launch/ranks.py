"""Ranks of a launch: how a rank reports itself to the supervisor, and which rank ended first.

The first part runs inside the trainer: standard library only. The second part runs in the supervisor. A pidfd per rank
gives the order of deaths although the ranks are not children of the supervisor.
"""

from __future__ import annotations

import io
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from chronicle.launch.processes import Process, read_environment, read_exit_code, walk_children
from chronicle.metrics.log import attempt_of

OUTPUT_VARIABLE = "CHRONICLE_OUTPUT"
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def rank_of(environ: Mapping[str, str]) -> int | None:
    """Return this process's global rank from the launcher's variables; None outside a process group."""
    for name in RANK_VARIABLES:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def leave_group() -> None:
    """Destroy this process's group, and wait until no other thread of the process runs: the last line of a rank.

    A thread of gloo that lets go of a tensor needs the GIL. When the interpreter ends meanwhile, CPython before 3.14 ends that
    thread inside torch's C++, and the process is aborted (-6) after all its work was done. Seen in about 1 of 20 such ends.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    distributed.destroy_process_group()
    deadline, num_quiet = time.monotonic() + 2.0, 0
    while num_quiet < 3 and time.monotonic() < deadline:
        num_quiet = 0 if _has_busy_thread() else num_quiet + 1
        time.sleep(0.005)


def _has_busy_thread() -> bool:
    """Whether a thread besides this one runs or waits for a processor."""
    for name in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{name}/stat", "rb") as stat:
                state = stat.read().rpartition(b") ")[2][:1]
        except OSError:
            continue  # it has ended
        if state == b"R" and int(name) != threading.get_native_id():
            return True
    return False


def open_rank_output(
    rank: int | None = None, *, environ: Mapping[str, str] = os.environ
) -> bool:
    """Send stdout and stderr of this process to the supervisor as this rank's output; return whether they are sent.

    The rank's output becomes a socket to the supervisor on the same node, which writes `rank-<r>.log` and shows the lines.
    A socket instead of a file: a full disk then costs log lines and does not make `print` raise in the trainer. Without
    `chronicle run`, or when the socket cannot be reached, output stays where it is.

    Also sets both streams to line buffering without write-through: `python -u` writes one `print` in pieces, which mixes
    lines of several ranks (measured: 4,672 of 6,000).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    address = environ.get(OUTPUT_VARIABLE)
    if not address:
        return False
    number = rank if rank is not None else rank_of(environ)
    return _connect(address, 0 if number is None else number, environ)


def _connect(address: str, rank: int, environ: Mapping[str, str]) -> bool:
    hello = {"v": 1, "rank": rank, "pid": os.getpid(), "world_size": environ.get("WORLD_SIZE")}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        try:
            line.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
            line.sendall(json.dumps(hello).encode() + b"\n")
        except OSError:
            return False  # another network namespace, or the supervisor is gone: keep the launcher's streams
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(line.fileno(), 1)
        os.dup2(line.fileno(), 2)
    return True


# --- In the supervisor: which process is which rank


ONE_LOOK_SECONDS = 0.05
SETTLING_SECONDS = 120.0  # after a rank's end its launcher may start the group again


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDeath:
    """One rank's process ended; `time` is monotonic seconds.

    `code` is its exit code, negative for a signal; None where its launcher had waited for it before we looked, named none,
    and the kernel is older than 6.15.
    """

    rank: int
    pid: int
    time: float
    code: int | None = None


def ranks_among(tree: Iterable[Process]) -> dict[int, int]:
    """The process of each rank, by the environments: of those with one number the topmost. A parent comes before its child."""
    found: dict[int, int] = {}
    rank_by_pid: dict[int, int] = {}
    for process in tree:
        rank = rank_of(read_environment(process.pid) or {})
        if rank is None:
            continue
        rank_by_pid[process.pid] = rank
        if rank_by_pid.get(process.parent) != rank:
            found[rank] = process.pid
    return found


@dataclass
class RankWatch:
    """Ranks of one launch on this host. A launcher may start them again (`torchrun --max-restarts`)."""

    selector: selectors.BaseSelector
    clock: Callable[[], float] = time.monotonic
    apart: Callable[[], int | None] = lambda: None  # a child of ours that is no part of the launch
    pids: dict[int, int] = field(default_factory=dict)
    deaths: list[RankDeath] = field(default_factory=list)
    _attempts: dict[int, int] = field(default_factory=dict)  # pid -> which start of the ranks it is of
    _handles: dict[int, int] = field(default_factory=dict)  # rank -> pidfd
    _known: set[tuple[int, int]] = field(default_factory=set)
    _rank_by_pid: dict[int, int] = field(default_factory=dict)  # of every process that was seen, a rank's children too
    _expected: int = 0  # ranks on this machine, as their environment says; 0 for not known
    _found: set[int] = field(default_factory=set)  # ranks of the present attempt that were seen at all

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
        attempt = attempt_of(read_environment(pid) or {})
        if attempt > max(self._attempts.values(), default=0):
            self._found.clear()
        self._attempts[pid] = attempt
        self._found.add(rank)
        self._handles[rank] = handle
        self.selector.register(handle, selectors.EVENT_READ, lambda: self._ended(rank, pid))

    def look(self) -> list[tuple[int, int]]:
        """Find ranks by their environment; return the living process tree as (pid, start ticks)."""
        tree = walk_children(os.getpid(), apart=self.apart())
        for process in tree:
            if process.key in self._known or not process.alive:
                continue
            environment = read_environment(process.pid)
            rank = None if environment is None else rank_of(environment)
            if environment is None or rank is None:
                continue
            self._rank_by_pid[process.pid] = rank
            local = environment.get("LOCAL_WORLD_SIZE", "")
            self._expected = max(self._expected, int(local) if local.isdecimal() else 0)
            # children of a rank inherit its number: only the topmost process is the rank
            if self._rank_by_pid.get(process.parent) != rank and process.parent not in self.pids.values():
                self.add(rank, process.pid)
            self._known.add(process.key)
        return [process.key for process in tree if process.alive]

    @property
    def unsettled(self) -> bool:
        """Whether a rank ended a short time ago: its launcher may be starting the group again."""
        return any(self.clock() - death.time < SETTLING_SECONDS for death in self.deaths)

    @property
    def complete(self) -> bool:
        """Whether every rank of this machine has been seen; False where nothing says how many there are."""
        return 0 < self._expected <= len(self._found)

    def first_death(self) -> RankDeath | None:
        """Return the rank of the present attempt that ended first; None when none has ended, or when that is not known.

        A rank that had finished, or was ended by TERM, is no failure where another one failed.
        """
        first = self._first_seen()
        if first is not None and first.code == 0:
            failed = [one for one in self._own_deaths() if one.code not in (None, 0, -signal.SIGTERM)]
            return min(failed, key=lambda death: death.time, default=first)
        return first

    def _own_deaths(self) -> list[RankDeath]:
        """Of the present attempt: the ranks' environments have the restart count."""
        newest = max(self._attempts.values(), default=0)
        return [death for death in self.deaths if self._attempts.get(death.pid, 0) == newest]

    def _first_seen(self) -> RankDeath | None:
        """By the order in which their ends were seen.

        Of ranks that were found ended in one look, one that the launcher had to end (TERM) was not the first. Nor was it where
        another rank was never seen.
        """
        deaths = self._own_deaths()
        if not deaths:
            return None
        first = min(deaths, key=lambda death: death.time)
        if first.code != -signal.SIGTERM:
            return first
        others = (death for death in deaths if death.code != first.code and death.time - first.time < ONE_LOOK_SECONDS)
        return next(others, None if len(self._found) < self._expected else first)

    def collect(self) -> None:
        """Record ranks that have ended since the last event."""
        for key, _ in self.selector.select(0):
            if key.fd in self._handles.values():
                key.data()

    def close(self) -> None:
        """Close all pidfds."""
        for rank in list(self._handles):
            self._close(rank)

    def _ended(self, rank: int, pid: int) -> None:
        self.deaths.append(RankDeath(rank=rank, pid=pid, time=self.clock(), code=read_exit_code(pid, self._handles[rank])))
        self._close(rank)

    def _close(self, rank: int) -> None:
        handle = self._handles.pop(rank)
        self.selector.unregister(handle)
        os.close(handle)
