"""Keep track of every process a launch starts, and end all of them.

Four mechanisms, none of which needs root: a cgroup where one can be created, the subreaper attribute (orphans become
children of the supervisor instead of pid 1), a token in the environment (found even under another parent), and a
parent-death signal on the launcher. torchrun starts each worker in its own session, so killing a process group would
miss them. Sources: cgroup-v2.rst, prctl(2); measured in `tests/launch/test_matrix.py`.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from chronicle.launch.processes import (
    Process,
    list_descendants,
    list_processes,
    read_process,
    read_variable,
    send_signal,
)

MOUNTS = Path("/proc/self/mountinfo")
OWN = Path("/proc/self/cgroup")
PREFIX = "chronicle-"
OOM_LINE = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class ControlGroup:
    """A cgroup directory below our own. Failures here are ignored, because subreaper and token still apply."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def joining(self, then: Callable[[], None]) -> Callable[[], None]:
        """Return the function a new child runs before exec: it enters the cgroup, then calls `then`."""
        procs = os.fsencode(self.path / "cgroup.procs")

        def prepare() -> None:
            try:
                handle = os.open(procs, os.O_WRONLY)
                os.write(handle, b"0")
                os.close(handle)
            except OSError:
                pass  # the supervisor checks with `holds` and reports it
            then()

        return prepare

    def holds(self, pid: int) -> bool:
        """Return whether this process is in the cgroup or in one below it."""
        try:
            lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines()
        except OSError:
            return False
        mine = (line[3:] for line in lines if line.startswith("0::"))
        return any(f"/{self.path.name}/" in f"{path}/" for path in mine)

    def processes(self) -> list[Process]:
        """Return the living processes of the cgroup."""
        found = (read_process(pid) for pid in self._pids())
        return [process for process in found if process is not None and process.alive]

    def oom_kills(self) -> int | None:
        """How many of its processes the kernel has ended for lack of memory; None without a counter here."""
        return read_oom_kills(self.path)

    def kill(self) -> None:
        """Kill every process of the cgroup at once, including processes that are forking."""
        try:
            (self.path / "cgroup.kill").write_text("1", encoding="ascii")
        except OSError:
            pass  # Linux before 5.14 has no cgroup.kill: processes are killed one by one

    def remove(self) -> bool:
        """Remove the cgroup; False while processes are still in it."""
        try:
            for directory, _, _ in os.walk(self.path, topdown=False):
                os.rmdir(directory)
        except OSError:
            return False
        return True

    def _pids(self) -> Iterator[int]:
        for directory, _, _ in os.walk(self.path):
            try:
                words = Path(directory, "cgroup.procs").read_text(encoding="ascii").split()
            except OSError:
                continue
            yield from map(int, words)


def make_group(token: str, environ: Mapping[str, str]) -> ControlGroup | None:
    """Create a cgroup below ours, named after the launch's token; None inside SLURM or where cgroups are not writable."""
    if environ.get("SLURM_JOB_ID"):
        return None
    own = next((directory for controllers, directory in own_groups() if not controllers), None)
    outside = own is None or "/.." in str(own)  # of our cgroup namespace
    if own is None or outside or not os.access(own / "cgroup.procs", os.W_OK):
        return None
    group = ControlGroup(own / f"{PREFIX}{token[:16]}")
    try:
        group.path.mkdir()
    except OSError:
        return None
    if not os.access(group.path / "cgroup.procs", os.W_OK):
        group.remove()
        return None
    return group


def open_group(path: str | None) -> ControlGroup | None:
    """Return the cgroup of a launch while it exists; None for a path whose name is not one of ours."""
    if not path or not Path(path).name.startswith(PREFIX) or not Path(path, "cgroup.procs").is_file():
        return None
    return ControlGroup(Path(path))


def own_groups(cgroups: Path = OWN, mounts: Path = MOUNTS) -> list[tuple[str, Path]]:
    """Our control groups as (controllers, directory), found through the mount table; version 2's has no controllers named."""
    try:
        mine = [line.split(":", 2) for line in cgroups.read_text(encoding="utf-8").splitlines()]
        mounted = [line.split() for line in mounts.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return []
    found = []
    for words in mounted:
        root, point, kind = words[3], words[4], words[words.index("-") + 1] if "-" in words else ""
        held = {"cgroup2": {""}, "cgroup": set(words[-1].split(","))}.get(kind, set())
        for _, controllers, path in mine:
            if held.issuperset(controllers.split(",")):
                below = path if root == "/" else path.removeprefix(root)
                found.append((controllers, Path(point) / below.lstrip("/")))
    return found


def read_oom_kills(group: Path, name: str = "memory.events") -> int | None:
    """How many processes of a control group the kernel has ended for lack of memory; None without a counter."""
    try:
        found = OOM_LINE.search((group / name).read_text(encoding="ascii"))
    except OSError:
        return None
    return None if found is None else int(found[1])


# --- Subreaper, token, and ending processes

TOKEN_ONLY = "token only"
TOKEN_VARIABLE = "CHRONICLE_TOKEN"
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_ROUNDS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class EndReport:
    """Result of ending processes. `left`: processes still alive, in an uninterruptible system call."""

    terminated: int
    killed: int
    left: tuple[Process, ...]


def _prctl(option: int, value: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(option, value, 0, 0, 0) == 0)


def become_subreaper() -> bool:
    """Make this process the subreaper of its descendants; False where the kernel does not support it."""
    try:
        return _prctl(PR_SET_CHILD_SUBREAPER, 1)
    except (OSError, AttributeError):
        return False


def die_with_parent(number: int = signal.SIGTERM) -> Callable[[], None]:
    """Return the function a new child runs before exec, so that it receives `number` when the parent thread ends."""
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # the parent died between fork and prctl
            os.kill(os.getpid(), number)

    return prepare


def describe_containment(subreaper: bool, group: ControlGroup | None = None) -> str:
    """Describe the mechanisms in force, for the journal, the exit report and `chronicle ps`."""
    named = ["cgroup"] if group is not None else []
    named += ["subreaper"] if subreaper else []
    holds = [" + ".join([*named, "token"])] if named else [f"{TOKEN_ONLY} (no cgroup, no subreaper: orphans go to pid 1)"]
    if group is not None:
        return holds[0]
    try:
        outer = Path("/proc/self/cgroup").read_text(encoding="utf-8").rsplit(":", 1)[-1].strip()
    except OSError:
        outer = "/"
    if "slurm" in outer or outer.endswith(".scope"):
        holds.append(f"inside {outer}")
    return ", ".join(holds)


def find_contained(token: str, group: ControlGroup | None = None, *, apart: int | None = None) -> list[Process]:
    """List living processes of a launch: in its cgroup, below this process, or with its token in their environment."""
    table = list_processes()
    below = {process.key for process in list_descendants(os.getpid(), table, apart=apart)}
    found = {process.key: process for process in (group.processes() if group is not None else ())}
    for process in table:
        is_other = process.alive and process.pid != os.getpid()
        if is_other and (process.key in below or read_variable(process.pid, TOKEN_VARIABLE) == token):
            found[process.key] = process
    return list(found.values())


def end_processes(
    find: Callable[[], list[Process]],
    *,
    term_seconds: float,
    reap: Callable[[], None] = lambda: None,
    kill_all: Callable[[], None] = lambda: None,
) -> EndReport:
    """Send TERM to all processes that `find` returns, wait up to `term_seconds`, then send KILL until `find` returns none.

    `find` is called again each round, because a dying process can still fork. `kill_all` kills a whole cgroup at once,
    before each KILL round.
    """

    def remaining() -> list[Process]:
        reap()
        return find()

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
