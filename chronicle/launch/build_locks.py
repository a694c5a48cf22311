"""Locks of builds that torch waits for: extensions that DeepSpeed and others compile at their first use.

`torch.utils.file_baton.FileBaton` makes a file `lock` in the build directory, keeps it open while it builds, and removes it.
Others wait until it is gone, without a word and without end; a builder that was killed leaves it. It does not say whose it is.

A builder has the file open, so a lock that no process has open belongs to none, if all processes that could have made it can
be seen from here: the file system is of this machine alone, the process IDs are not those of a container, and the processes
of the file's owner may be read. Only such a lock is called dead, and only such a lock is removed.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["BuildLock", "find_build_locks", "remove_dead_lock"]

FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel: all processes of the machine are seen in it
OF_ONE_MACHINE = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "overlay", "bcachefs"})
OF_ONE_CONTAINER = frozenset({"overlay"})  # its upper layer belongs to one container, whose processes are all seen in it
SECONDS = 5.0  # a lock that is younger is not judged: its maker may be about to end


class BuildLock(NamedTuple):
    """One lock. `holder` is the process that has it open, None for none; `dead` says that none anywhere can have it."""

    path: Path
    inode: int
    age: float  # seconds since it was made
    quiet: float  # seconds since anything was written beside it
    holder: int | None
    dead: bool
    doubt: str = ""  # why a lock without a holder is not called dead

    @property
    def text(self) -> str:
        """One sentence: what is waited for, since when, and whether it will end."""
        since = f"`{self.path}`, made {_age(self.age)} ago"
        if self.holder is not None:
            return f"process {self.holder} builds `{self.path.parent.name}` (lock {since}); others wait for its end"
        if self.dead:
            return f"no process holds the build lock {since}: its build was killed, and torch waits for it without end"
        return f"no process here holds the build lock {since}, last write beside it {_age(self.quiet)} ago; {self.doubt}"

    @property
    def remedy(self) -> str:
        """What to type; "" where a build is under way."""
        return "" if self.holder is not None else f"if no build is under way elsewhere: rm {self.path}"


def find_build_locks(environ: Mapping[str, str] = os.environ, *, proc: Path = Path("/proc")) -> list[BuildLock]:
    """The locks below torch's directory of extensions, oldest first; a directory that cannot be read holds none."""
    found = [lock for path in _paths(environ) if (lock := _judge(path, proc)) is not None]
    return sorted(found, key=lambda lock: -lock.age)


def remove_dead_lock(lock: BuildLock, *, proc: Path = Path("/proc")) -> bool:
    """Remove a lock that is dead, and is still the file that was judged; whether it was removed.

    The file is locked while it is judged again, so of several processes that find it one removes it, and none removes the
    lock of a build that began since.
    """
    try:
        descriptor = os.open(lock.path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        again = _judge(lock.path, proc, but=os.getpid())
        if again is None or not again.dead or not again.inode == lock.inode == os.fstat(descriptor).st_ino:
            return False
        lock.path.unlink()
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _paths(environ: Mapping[str, str]) -> Iterator[Path]:
    """Where torch's `_get_build_directory` would look: the named directory, else one of each Python and device."""
    named = environ.get("TORCH_EXTENSIONS_DIR")
    home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".cache")
    root = Path(named or os.path.join(home, "torch_extensions"))
    try:
        yield from root.glob("*/lock" if named else "*/*/lock")
    except OSError:
        return


def _judge(path: Path, proc: Path, but: int | None = None) -> BuildLock | None:
    try:
        found, now = os.lstat(path), time.time()
        if not stat.S_ISREG(found.st_mode):
            return None
        written = max(one.stat(follow_symlinks=False).st_mtime for one in os.scandir(path.parent))
    except (OSError, ValueError):
        return None
    age = now - found.st_mtime
    holder, unread = _holder(found, proc, but)
    doubt = "" if holder is not None else _doubt(path, found, unread, proc)
    dead = holder is None and not doubt and age > SECONDS
    return BuildLock(path, found.st_ino, age, now - written, holder, dead, doubt or "it is too young to be judged")


def _holder(found: os.stat_result, proc: Path, but: int | None) -> tuple[int | None, int]:
    """The process that has this file open, and how many processes of its owner could not be asked."""
    unread = 0
    for directory in proc.iterdir():
        if not directory.name.isdigit() or int(directory.name) == but:
            continue
        try:
            for name in os.listdir(directory / "fd"):
                try:
                    one = os.stat(directory / "fd" / name)
                except OSError:
                    continue
                if (one.st_dev, one.st_ino) == (found.st_dev, found.st_ino):
                    return int(directory.name), unread
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            try:
                unread += directory.stat().st_uid == found.st_uid
            except OSError:
                continue
    return None, unread


def _doubt(path: Path, found: os.stat_result, unread: int, proc: Path) -> str:
    """Why a builder might exist that cannot be seen from here; "" for no reason."""
    kind = _file_system(path, proc)
    if kind not in OF_ONE_MACHINE:
        return f"a build on another machine may (file system: {kind or 'unknown'})"
    if os.geteuid() not in (0, found.st_uid) or unread:
        return "one of another user may"
    try:
        here = os.readlink(proc / "self/ns/pid")
    except OSError:
        here = ""
    if here != FIRST_PID_NAMESPACE and kind not in OF_ONE_CONTAINER:
        return "one in another container may"
    return ""


def _file_system(path: Path, proc: Path) -> str:
    """The type of the file system of a path, by the innermost mount above it in mountinfo (proc(5)); "" for none."""
    try:
        lines = (proc / "self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        whole = os.path.realpath(path)
    except OSError:
        return ""
    kinds = {"": ""}
    for line in lines:
        fields, _, rest = line.partition(" - ")
        mount = fields.split()[4].rstrip("/") if rest else None
        if mount is not None and whole.startswith(f"{mount}/"):
            kinds[f"{mount}/"] = rest.split()[0]
    return kinds[max(kinds, key=len)]


def _age(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else (f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h")
