"""A control group of its own for a launch, where this user may make one: what is in it cannot leave it, and dies at once.

Needs a writable group of version 2: root in most containers, `systemd-run --user --scope` for everybody else. Without it
nothing is lost but this hold; inside a SLURM job the groups are SLURM's and are left alone. Kernel: cgroup-v2.rst.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from chronicle.launch.processes import Process, read_process

__all__ = ["ControlGroup", "make_group", "open_group"]

MOUNTS = Path("/proc/self/mountinfo")
OWN = Path("/proc/self/cgroup")
PREFIX = "chronicle-"


class ControlGroup:
    """A directory below our own group. Everything here may fail quietly: the other holds remain."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def joining(self, then: Callable[[], None]) -> Callable[[], None]:
        """What a new child runs before exec: enter the group, then the rest."""
        procs = os.fsencode(self.path / "cgroup.procs")

        def prepare() -> None:
            try:
                handle = os.open(procs, os.O_WRONLY)
                os.write(handle, b"0")
                os.close(handle)
            except OSError:
                pass  # said by the supervisor, which looks where the launcher is
            then()

        return prepare

    def holds(self, pid: int) -> bool:
        """Whether this process is in the group or below it."""
        try:
            lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines()
        except OSError:
            return False
        mine = (line[3:] for line in lines if line.startswith("0::"))
        return any(f"/{self.path.name}/" in f"{path}/" for path in mine)

    def processes(self) -> list[Process]:
        """Everything alive in it."""
        found = (read_process(pid) for pid in self._pids())
        return [process for process in found if process is not None and process.alive]

    def kill(self) -> None:
        """End everything in it in one stroke, forks in progress included."""
        try:
            (self.path / "cgroup.kill").write_text("1", encoding="ascii")
        except OSError:
            pass  # before Linux 5.14: processes are ended one by one

    def remove(self) -> bool:
        """Remove the group once it is empty; False while something is in it."""
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
    """A new group below ours, named by the launch's token; None where that is not ours to do."""
    if environ.get("SLURM_JOB_ID"):
        return None
    own = _own_directory()
    if own is None or not os.access(own / "cgroup.procs", os.W_OK):
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
    """The group a launch was started in, while it exists; only ever one that we named."""
    if not path or not Path(path).name.startswith(PREFIX) or not Path(path, "cgroup.procs").is_file():
        return None
    return ControlGroup(Path(path))


def _own_directory() -> Path | None:
    """Our own group of version 2 as a directory, through the mount that shows it."""
    try:
        own = next((line[3:] for line in OWN.read_text(encoding="utf-8").splitlines() if line.startswith("0::")), None)
        mounts = [line.split() for line in MOUNTS.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    if own is None or "/.." in own:  # outside of what our namespace shows
        return None
    for words in mounts:
        if "-" in words and words[words.index("-") + 1] == "cgroup2":
            root, point = words[3], words[4]
            below = own if root == "/" else own.removeprefix(root)
            return Path(point) / below.lstrip("/")
    return None
