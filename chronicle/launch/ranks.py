"""Which process is which rank, and who ended first.

Ranks tell themselves (`rank_output`), or the launcher's own variables in their environment tell. A pidfd per rank gives
the order of deaths even though these are not our children: the launcher reaps them and keeps the order to itself.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable
from dataclasses import dataclass

from chronicle.launch.processes import read_environment, walk_children
from chronicle.launch.rank_output import rank_of

__all__ = ["RankDeath", "RankWatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDeath:
    """One rank's process ended; `time` is monotonic seconds."""

    rank: int
    pid: int
    time: float


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
        """This process is that rank; said twice changes nothing."""
        if self.pids.get(rank) == pid:
            return
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            return
        if rank in self._handles:  # the launcher restarted its group: the new process counts
            self._close(rank)
        self.pids[rank] = pid
        self._handles[rank] = handle
        self._selector.register(handle, selectors.EVENT_READ, lambda: self._ended(rank, pid))

    def look(self) -> list[tuple[int, int]]:
        """Find ranks by the environment launchers give them; returns the live tree as (pid, start ticks)."""
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
        """The rank that ended first, when at least one was known."""
        return min(self.deaths, key=lambda death: death.time) if self.deaths else None

    def collect(self) -> None:
        """Note ranks that have ended since the last event, in rank order."""
        for key, _ in self._selector.select(0):
            if key.fd in self._handles.values():
                key.data()

    def close(self) -> None:
        """Release the handles."""
        for rank in list(self._handles):
            self._close(rank)

    def _ended(self, rank: int, pid: int) -> None:
        self.deaths.append(RankDeath(rank=rank, pid=pid, time=self._clock()))
        self._close(rank)

    def _close(self, rank: int) -> None:
        handle = self._handles.pop(rank)
        self._selector.unregister(handle)
        os.close(handle)
