"""Keeping hold of everything a launch starts, and ending all of it.

Holds that need no root: a control group where we may make one (`cgroup`), the subreaper attribute (orphans become our
children instead of pid 1's), the token in the environment (found even when somebody else adopted them), and a
parent-death signal on the launcher (a supervisor that is killed does not leave it running). torchrun puts each worker
into its own session, so killing a process group would miss them: nothing here does. Source: prctl(2); measured in
`tests/launch/test_matrix.py`.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from chronicle.launch.cgroup import ControlGroup
from chronicle.launch.processes import Process, list_descendants, list_processes, read_environment, send_signal

__all__ = [
    "TOKEN_VARIABLE",
    "EndReport",
    "become_subreaper",
    "describe_containment",
    "die_with_parent",
    "end_processes",
    "find_contained",
    "list_tagged",
]

TOKEN_VARIABLE = "CHRONICLE_TOKEN"
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_ROUNDS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class EndReport:
    """What ending a set of processes took; `left` is what is still alive, uninterruptible in the kernel."""

    terminated: int
    killed: int
    left: tuple[Process, ...]


def _prctl(option: int, value: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(option, value, 0, 0, 0) == 0)


def become_subreaper() -> bool:
    """Adopt orphaned descendants from now on; False where the kernel has no such thing."""
    try:
        return _prctl(PR_SET_CHILD_SUBREAPER, 1)
    except (OSError, AttributeError):
        return False


def die_with_parent(number: int = signal.SIGTERM) -> Callable[[], None]:
    """Return what a new child runs before exec, so that it gets `number` when the thread that started it dies."""
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it died between fork and prctl
            os.kill(os.getpid(), number)

    return prepare


def describe_containment(subreaper: bool, group: ControlGroup | None = None) -> str:
    """Which holds are in force, for the journal, the exit report and `chronicle ps`."""
    named = ["cgroup"] if group is not None else []
    named += ["subreaper"] if subreaper else []
    holds = [" + ".join([*named, "token"])] if named else ["token only (no cgroup, no subreaper: orphans go to pid 1)"]
    if group is not None:
        return holds[0]
    try:
        outer = Path("/proc/self/cgroup").read_text(encoding="utf-8").rsplit(":", 1)[-1].strip()
    except OSError:
        outer = "/"
    if "slurm" in outer or outer.endswith(".scope"):
        holds.append(f"inside {outer}")
    return ", ".join(holds)


def list_tagged(token: str, table: Iterable[Process] | None = None) -> list[Process]:
    """Living processes whose environment carries this token, ourselves left out."""
    me = os.getpid()
    found = []
    for process in list_processes() if table is None else table:
        if process.pid != me and process.alive:
            environment = read_environment(process.pid)
            if environment is not None and environment.get(TOKEN_VARIABLE) == token:
                found.append(process)
    return found


def find_contained(token: str, group: ControlGroup | None = None) -> list[Process]:
    """Living processes of a launch: in its group, below this process in the tree, or carrying its token anywhere."""
    table = list_processes()
    found = {process.key: process for process in list_descendants(os.getpid(), table) if process.alive}
    found.update((process.key, process) for process in list_tagged(token, table))
    found.update((process.key, process) for process in (group.processes() if group is not None else ()))
    return list(found.values())


def end_processes(
    find: Callable[[], list[Process]],
    *,
    term_seconds: float,
    reap: Callable[[], None] = lambda: None,
    kill_all: Callable[[], None] = lambda: None,
    spare: Callable[[Process], bool] = lambda process: False,
) -> EndReport:
    """TERM everything `find` returns, wait up to `term_seconds`, then KILL in rounds until it returns nothing.

    `find` is asked again each round, because a dying process can still fork. Processes for which `spare` is true
    are neither signalled nor waited for. `kill_all` ends a whole group in one stroke, before each round.
    """

    def remaining() -> list[Process]:
        reap()
        return [process for process in find() if not spare(process)]

    seen: set[tuple[int, int]] = set()
    deadline = time.monotonic() + term_seconds
    terminated = killed = 0
    while (alive := remaining()) and (left := deadline - time.monotonic()) > 0:
        for process in alive:
            if process.key not in seen:
                seen.add(process.key)
                terminated += send_signal(process, signal.SIGTERM)
        _wait_for_one(alive, min(left, 0.5))
    for _ in range(KILL_ROUNDS):
        alive = remaining()
        if not alive:
            break
        kill_all()
        killed += sum(send_signal(process, signal.SIGKILL) for process in alive)
        _wait_for_one(alive, 0.2)
    return EndReport(terminated=terminated, killed=killed, left=tuple(remaining()))


def _wait_for_one(processes: Iterable[Process], seconds: float) -> None:
    """Return as soon as one of them ends, at the latest after `seconds`."""
    poller = select.poll()
    handles = []
    try:
        for process in processes:
            try:
                handles.append(os.pidfd_open(process.pid))
            except OSError:
                return
            poller.register(handles[-1], select.POLLIN)
        poller.poll(max(seconds, 0.0) * 1000)
    finally:
        for handle in handles:
            os.close(handle)
