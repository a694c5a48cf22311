"""Read processes from `/proc` (identity, parent, environment, command line) and send signals to exactly one of them.

A process is identified by (pid, start time in clock ticks since boot), because a pid alone may be reused. A signal is sent
through a pidfd after the start time was compared again. Formats: proc(5), pidfd_open(2). Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process as it was when read. `state` is the letter in `/proc/<pid>/stat`; `Z` is a zombie."""

    pid: int
    parent: int
    start_ticks: int
    state: str
    session: int
    uid: int
    name: str
    cpu_seconds: float

    @property
    def alive(self) -> bool:
        """False for a zombie: it has ended, and its parent has not read the exit code yet."""
        return self.state not in ("Z", "X")

    @property
    def key(self) -> tuple[int, int]:
        """Return (pid, start ticks), which is unique within one boot."""
        return self.pid, self.start_ticks


def parse_stat(text: str, uid: int) -> Process:
    """Parse one `/proc/<pid>/stat`. The name may contain spaces and brackets, so fields are counted from the last bracket."""
    opening, closing = text.index("("), text.rindex(")")
    fields = text[closing + 2 :].split()
    return Process(
        pid=int(text[:opening]),
        name=text[opening + 1 : closing],
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
        cpu_seconds=(int(fields[11]) + int(fields[12])) / TICKS,
        uid=uid,
    )


def read_process(pid: int) -> Process | None:
    """Return the process with this pid; None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return parse_stat(stat.read().decode("utf-8", "replace"), os.fstat(stat.fileno()).st_uid)
    except (OSError, ValueError):
        return None


PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, struct pidfd_info) with the 64 bytes of its first version
PIDFD_INFO_EXIT = 8


def read_exit_code(pid: int, handle: int) -> int | None:
    """The exit code of a process that has ended, negative for a signal; None where it cannot be had.

    Until its parent has waited for it: field 52 of `/proc/<pid>/stat`, which the kernel shows to those who may trace the
    process (proc(5)). Afterwards the pidfd `handle` still knows it, since Linux 6.15 (ioctl PIDFD_GET_INFO, linux/pidfd.h).
    """
    code = _read_zombies_code(pid)
    if code is not None:
        return code
    info = bytearray(64)
    struct.pack_into("=Q", info, 0, PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(handle, PIDFD_GET_INFO, info)
    except OSError:
        return None  # an older kernel
    (mask,), (status,) = struct.unpack_from("=Q", info, 0), struct.unpack_from("=i", info, 60)
    return os.waitstatus_to_exitcode(status) if mask & PIDFD_INFO_EXIT else None


def _read_zombies_code(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *fields = text.rpartition(")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[-1])) if state in "ZX" else None
    except (OSError, ValueError, IndexError):
        return None


def list_processes() -> list[Process]:
    """List every process this user can see, in order of pid."""
    pids = sorted(int(name) for name in os.listdir(PROC) if name.isdigit())
    return [process for pid in pids if (process := read_process(pid)) is not None]


def list_descendants(root: int, table: Iterable[Process], *, apart: int | None = None) -> list[Process]:
    """List all descendants of `root`, from the whole process table. Complete as long as no process is reparented.

    Without the process `apart` and those below it.
    """
    children: dict[int, list[Process]] = {}
    for process in table:
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    waiting = [root]
    while waiting:
        below = [child for child in children.get(waiting.pop(), []) if child.pid != apart]
        found += below
        waiting += (process.pid for process in below)
    return found


def walk_children(root: int, *, apart: int | None = None) -> list[Process]:
    """Like `list_descendants`, but reads only this tree: cheap on a busy node, and may miss a process that just started."""
    found: list[Process] = []
    waiting = [root]
    while waiting:
        for child in _read_children(waiting.pop()):
            process = None if child == apart else read_process(child)
            if process is not None:
                found.append(process)
                waiting.append(child)
    return found


def _read_children(pid: int) -> list[int]:
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    children: list[int] = []
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children", "rb") as listing:
                children += (int(word) for word in listing.read().split())
        except OSError:  # the thread is gone, or the kernel was built without CONFIG_PROC_CHILDREN
            continue
    return children


def read_environment(pid: int) -> Mapping[str, str] | None:
    """Return the environment the process was started with; None when it cannot be read."""
    raw = _read_environ(pid)
    if raw is None:
        return None
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, _, value in pairs}


def read_variable(pid: int, name: str) -> str | None:
    """One variable of the environment the process was started with; None without it, or where it cannot be read.

    Every process of the machine is asked at the end of a launch; this is a third of the time of reading all their variables.
    """
    raw = b"\0" + (_read_environ(pid) or b"")
    _, found, rest = raw.rpartition(b"\0" + name.encode() + b"=")
    return rest.partition(b"\0")[0].decode("utf-8", "replace") if found else None


def _read_environ(pid: int) -> bytes | None:
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            return environ.read()
    except OSError:
        return None


def read_command(pid: int) -> list[str]:
    """Return the words of the command line; an empty list when the process is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
            words = cmdline.read().rstrip(b"\0").split(b"\0")
    except OSError:
        return []
    return [word.decode("utf-8", "replace") for word in words if word]


def read_boot_id() -> str:
    """Return the random id of this boot, which limits where pids and start times are valid; "" when unknown."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def signal_name(number: int) -> str:
    """Such as "SIGKILL"; "signal 64" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def send_signal(process: Process, number: int) -> bool:
    """Send a signal to this process and to no other; False when it has ended or may not be signalled."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        now = read_process(process.pid)
        if now is None or now.start_ticks != process.start_ticks:
            return False  # the pid was reused
        signal.pidfd_send_signal(handle, number)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
