"""Pulses: what the processes of a launch say of themselves to their supervisor, in a directory in memory.

    <pid>-<start ticks>-<signal>-<e|f>.stacks   every Python process, at its start: "this signal prints my stacks here"
    <pid>-<start ticks>.pulse                   a guarded rank: 64 bytes, rewritten at each step and forward pass
    <restart count>-<rank>.attempt              a rank that torchrun started: "<pid> <start ticks>", once an attempt

The first half runs inside the trainer: standard library only, no system call for each step. The directory lies in `/dev/shm`:
a page of a network file system could block the trainer that writes to it. A process is named by (pid, start time), so that a
reused pid is not taken for it, and a signal goes only to a process that announced it and still catches it (`SigCgt` of
`/proc/<pid>/status`). `startup/sitecustomize.py` writes the announcement: it runs in every Python under `chronicle run`.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from chronicle.launch.processes import Process, read_process, send_signal

PULSES_VARIABLE = "CHRONICLE_PULSES"
MEMORY = Path("/dev/shm")
PREFIX = "chronicle-"
MAGIC = 0x43485031
SIZE = 64
# magic, rank, optimizer steps, time of the last one, signs of work, time of the last one
LAYOUT = struct.Struct("<IiQdQd")
COUNT_AND_TIME = struct.Struct("<Qd")
STEP_AT, SIGN_AT = 8, 24


class Pulse(NamedTuple):
    """What a rank said last. Times are `time.monotonic()` of this machine, 0 for never."""

    pid: int
    start_ticks: int
    rank: int
    steps: int
    stepped_at: float
    signs: int  # forward passes and saves: work that is no step
    signed_at: float


class PulseWriter:
    """A rank's pulse. Without a supervisor, or where its directory cannot be written, every call does nothing."""

    def __init__(self, rank: int, environ: Mapping[str, str] = os.environ) -> None:
        self._page: mmap.mmap | None = None
        self._steps = self._signs = 0
        directory = environ.get(PULSES_VARIABLE)
        me = read_process(os.getpid()) if directory else None
        if not directory or me is None:
            return
        try:
            fd = os.open(os.path.join(directory, f"{me.pid}-{me.start_ticks}.pulse"), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(fd, SIZE)
                self._page = mmap.mmap(fd, SIZE)
            finally:
                os.close(fd)
            LAYOUT.pack_into(self._page, 0, MAGIC, rank, 0, 0.0, 0, 0.0)
        except (OSError, ValueError):
            self._page = None

    def step(self, clock: Callable[[], float] = time.monotonic) -> None:
        """An optimizer step begins."""
        if self._page is not None:
            self._steps += 1
            COUNT_AND_TIME.pack_into(self._page, STEP_AT, self._steps, clock())

    def sign(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Work that is no step: a forward pass, in training or evaluation, or a save that is done."""
        if self._page is not None:
            self._signs += 1
            COUNT_AND_TIME.pack_into(self._page, SIGN_AT, self._signs, clock())


# --- in the supervisor


class Announcement(NamedTuple):
    """A process that prints the stacks of its threads to `path` when it gets `signal`. `forked`: by `fork` without `exec`."""

    process: Process
    signal: int
    path: Path
    forked: bool


def make_pulses_dir() -> Path | None:
    """Create the directory of a launch, in memory where that can be had; None where nothing can be created.

    Directories of supervisors of this user and pid namespace that are gone are removed.
    """
    me = read_process(os.getpid())
    if me is None:
        return None
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    name = f"{PREFIX}{namespace}-{me.pid}-{me.start_ticks}-"
    for base in (MEMORY, Path(os.environ.get("TMPDIR") or "/tmp")):
        try:
            _remove_stale(base, namespace, me.uid)
            directory = base / (name + os.urandom(4).hex())
            directory.mkdir(0o700)
            return directory
        except OSError:
            continue
    return None


def _remove_stale(base: Path, namespace: int, uid: int) -> None:
    for entry in os.scandir(base):
        words = entry.name.removeprefix(PREFIX).split("-") if entry.name.startswith(PREFIX) else []
        if len(words) != 4 or not all(word.isdigit() for word in words[:3]) or int(words[0]) != namespace:
            continue
        owner = read_process(int(words[1]))
        gone = owner is None or owner.start_ticks != int(words[2])
        if gone and entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == uid:
            shutil.rmtree(entry.path, ignore_errors=True)


def remove_pulses_dir(directory: Path | None) -> None:
    """Remove the directory at the end of the launch."""
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


def read_pulses(directory: Path) -> list[Pulse]:
    """The pulses of living processes, in order of rank. A rank that was started again counts once, with its newest process."""
    found: dict[int, Pulse] = {}
    for name in _names(directory, ".pulse"):
        pulse = _read_pulse(directory / name)
        if pulse is not None and _lives(pulse.pid, pulse.start_ticks) is not None:
            known = found.get(pulse.rank)
            if known is None or pulse.start_ticks >= known.start_ticks:
                found[pulse.rank] = pulse
    return [found[rank] for rank in sorted(found)]


def _read_pulse(path: Path) -> Pulse | None:
    try:
        pid, ticks = map(int, path.name.removesuffix(".pulse").split("-"))
        with open(path, "rb") as page:
            magic, rank, *rest = LAYOUT.unpack_from(page.read(SIZE))
    except (OSError, ValueError, struct.error):
        return None
    return Pulse(pid, ticks, rank, *rest) if magic == MAGIC else None


def read_announcements(directory: Path) -> dict[int, Announcement]:
    """By pid: the living processes that announced a signal."""
    found = {}
    for name in _names(directory, ".stacks"):
        try:
            pid, ticks, number, how = name.removesuffix(".stacks").split("-")
            process = _lives(int(pid), int(ticks))
            if process is not None:
                found[int(pid)] = Announcement(process, int(number), directory / name, how == "f")
        except ValueError:
            continue
    return found


class AttemptBegun(NamedTuple):
    """A rank's word, at its start, of how often torchrun has started it again. It stays when the rank has ended."""

    attempt: int
    rank: int
    pid: int
    start_ticks: int


def read_attempts_begun(directory: Path | None) -> list[AttemptBegun]:
    """What the ranks of this machine said, in order of the attempt and its processes' starts."""
    found = []
    for name in () if directory is None else _names(directory, ".attempt"):
        assert directory is not None
        try:
            count, rank = map(int, name.removesuffix(".attempt").split("-"))
            pid, ticks = map(int, (directory / name).read_bytes().split())
        except (OSError, ValueError):
            continue  # it is written at this very moment
        found.append(AttemptBegun(count, rank, pid, ticks))
    return sorted(found, key=lambda one: (one.attempt, one.start_ticks))


def _names(directory: Path, ending: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if name.endswith(ending))
    except OSError:
        return []


def _lives(pid: int, ticks: int) -> Process | None:
    process = read_process(pid)
    return process if process is not None and process.start_ticks == ticks and process.alive else None


def ask_for_stacks(announced: Announcement) -> str:
    """Send the announced signal; returns "" when it was sent, else why not. Nobody gets a signal that would end it."""
    pid = announced.process.pid
    now = read_process(pid)
    if now is None or now.start_ticks != announced.process.start_ticks:
        return "the process has ended"
    if now.state in "Tt":
        return "it is stopped, so that it cannot print its stack"
    if not _catches(pid, announced.signal):
        return "it no longer catches the signal that it announced"
    if not _holds_open(pid, announced.path):
        return "it has closed the file for its stacks"
    return "" if send_signal(announced.process, announced.signal) else "the signal could not be sent"


def _catches(pid: int, number: int) -> bool:
    """Whether a handler for this signal is installed now and it is not blocked in the main thread."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            lines = dict(line.split(b":", 1) for line in status.read().splitlines() if b":" in line)
        caught, blocked = int(lines[b"SigCgt"], 16), int(lines[b"SigBlk"], 16)
    except (OSError, ValueError, KeyError):
        return False
    bit = 1 << (number - 1)
    return bool(caught & bit) and not blocked & bit


def _holds_open(pid: int, path: Path) -> bool:
    """Whether the process still has this file open: else the number of its descriptor may name a file of the trainer."""
    try:
        wanted = os.stat(path)
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                found = os.stat(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    except OSError:
        return False
    return False
