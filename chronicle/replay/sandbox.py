"""A private view of the machine for a replay: it sees the run as it was, and whatever it writes ends in a directory of its own.

Linux only: a mount namespace (with a user namespace where we are not root). In it, overlays lie over the run's directory,
its checkpoint roots and the working directory: they are read as they are, under their own names, and written beside.
Everything else is read-only, but for temporary directories, caches and devices. So a stranger's script cannot write into the
run, whatever paths it has, and no checkpoint is copied: its identity is its own. Where the kernel gives no such namespace,
`SandboxRefused` says so.

It is cut off from the network, unless it is asked not to be: a script that reports to a server would report the steps again.
A process namespace, where it can be had, ends everything inside when the replay is killed.
"""

import ctypes
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from chronicle.errors import ChronicleError

NEWNS, NEWUSER, NEWPID, NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
SIOCSIFFLAGS, SIOCSIFADDR, UP_AND_RUNNING = 0x8914, 0x8916, 0x41
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, NOATIME, NODIRATIME = 1, 2, 4, 8, 32, 1024, 2048
BIND, REC, PRIVATE, RELATIME = 4096, 16384, 1 << 18, 1 << 21
FLAGS = {"nosuid": NOSUID, "nodev": NODEV, "noexec": NOEXEC, "noatime": NOATIME, "nodiratime": NODIRATIME, "relatime": RELATIME}
PDEATHSIG = 1
WRITABLE = ("/tmp", "/var/tmp", "/dev", "/proc", "/sys", "/run")
CACHES = ("TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "HF_HOME")
NO_PROC = 77  # code of a child that could not mount its own /proc


class SandboxRefused(ChronicleError):
    """This machine gives no private view: a script's saves could not be kept out of the run."""

    exit_code = 3


def minimal(directories: Iterable[Path]) -> list[Path]:
    """The directories without those that lie inside another of them."""
    found: list[Path] = []
    for one in sorted({Path(os.path.realpath(path)) for path in directories if path.is_dir()}):
        if not any(one == other or other in one.parents for other in found):
            found.append(one)
    return found


def enter_sandbox(overlaid: Sequence[Path], kept: Path, *, network: bool = False) -> list[str]:
    """Give this process its private view; `overlaid` are read as they are and written below `kept`.

    The process must have one thread. Returns what could not be made read-only. Raises `SandboxRefused`.
    """
    for directory in overlaid:
        if directory == kept or directory in kept.parents:
            raise SandboxRefused(
                f"the sandbox `{kept}` lies inside `{directory}`, which it is to be laid over",
                "name another with --sandbox DIR",
            )
    uid, gid = os.getuid(), os.getgid()
    if _unshare(NEWNS) != 0:
        if _unshare(NEWNS | NEWUSER) != 0:
            raise SandboxRefused(
                "no private mount namespace for this user (unshare: not permitted): a script's saves could not be kept out of "
                "the run's directories, so nothing was started",
                "replay as root or where unprivileged user namespaces are allowed (kernel.unprivileged_userns_clone)",
            )
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    if not network:
        _close_network()
    mount(None, "/", None, REC | PRIVATE)
    writable = [kept, *map(Path, WRITABLE), *(Path(os.environ[name]) for name in CACHES if os.environ.get(name))]
    writable += [Path.home() / ".cache", Path.home() / ".triton"]
    inner = [point for point, _ in _mounts() if any(Path(point) != one and one in Path(point).parents for one in overlaid)]
    saved = [(point, kept / f"mount-{number}") for number, point in enumerate(inner)]
    for point, place in saved:  # an overlay hides the mounts inside of what it is laid over
        place.mkdir()
        mount(point, str(place), None, BIND | REC)
    for path in writable:
        if path.is_dir() and not any(path == one or one in path.parents for one in overlaid):
            mount(str(path), str(path), None, BIND | REC)
    for number, directory in enumerate(overlaid):
        _overlay(directory, directory, kept, f"{number}")
    for number, (point, place) in enumerate(saved):
        if os.path.isdir(place):
            _overlay(place, Path(point), kept, f"inner-{number}")
    return list(_make_read_only([*overlaid, *writable, *(Path(point) for point, _ in saved)]))


def _close_network() -> None:
    """An empty network namespace, with loopback; this host's own address is there too, because launchers ask for its name."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"
    if _unshare(NEWNET) != 0:
        raise SandboxRefused(
            "no private network namespace for this user (unshare: not permitted): the script would reach the network",
            "--network lets it: what it uploads or deletes there is done again",
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        fcntl.ioctl(asked, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", UP_AND_RUNNING))
        if not address.startswith("127."):
            fcntl.ioctl(asked, SIOCSIFADDR, struct.pack("16sH2x4s16x", b"lo:0", socket.AF_INET, socket.inet_aton(address)))


def _overlay(lower: Path, at: Path, kept: Path, name: str) -> None:
    upper, work = kept / f"upper-{name}", kept / f"work-{name}"
    upper.mkdir()
    work.mkdir()
    plain = f"lowerdir={_escaped(lower)},upperdir={_escaped(upper)},workdir={_escaped(work)}"
    problems = []
    for options in (plain, plain + ",userxattr"):
        try:
            mount("overlay", str(at), "overlay", 0, options)
            return
        except OSError as problem:
            problems.append(problem)
    raise SandboxRefused(
        f"no overlay over `{at}` can be mounted ({problems[0].strerror}): a script's saves could not be kept out of it",
        "name a directory on a local filesystem with --sandbox DIR",
    )


def _escaped(path: Path) -> str:
    return str(path).replace("\\", "\\\\").replace(",", "\\,").replace(":", "\\:")


def _make_read_only(writable: Sequence[Path]) -> Iterable[str]:
    """Remount everything else read-only; the mounts that would not let themselves."""
    for point, options in _mounts():
        path = Path(point)
        if "ro" in options or any(path == one or one in path.parents for one in writable):
            continue
        flags = sum(FLAGS[option] for option in options if option in FLAGS)
        try:
            mount(None, point, None, REMOUNT | BIND | RDONLY | flags)
        except OSError:
            yield point


def _mounts() -> list[tuple[str, tuple[str, ...]]]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        rows = [line.split() for line in table]
    return [(row[4].encode().decode("unicode_escape"), tuple(row[5].split(","))) for row in rows]


def run_inside(work: Callable[[], int]) -> int:
    """Run `work` in a process of its own that dies with this one, in a process namespace where there can be one.

    Returns its exit code, 128 + n for a signal. The caller is inside of the private view.
    """
    code = _forked(lambda: _in_own_pids(work))
    return _forked(work) if code == NO_PROC else code


def _forked(work: Callable[[], int]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            end_with_parent()
            code = work()
        finally:
            os._exit(code)
    return _code_of(os.waitpid(child, 0)[1])


def _in_own_pids(work: Callable[[], int]) -> int:
    if _unshare(NEWPID) != 0:
        return NO_PROC

    def first_process() -> int:
        try:
            mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
        except OSError:
            return NO_PROC
        return _as_init(work)

    return _forked(first_process)


def _code_of(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _as_init(work: Callable[[], int]) -> int:
    """The first process of a namespace: it collects what others leave behind, and ends with its only real child."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            end_with_parent()
            code = work()
        finally:
            os._exit(code)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.kill(child, signal.SIGTERM))
    while True:
        pid, status = os.wait()
        if pid == child:
            return _code_of(status)


def end_with_parent() -> None:
    """KILL for this process when the one that started it ends."""
    _libc().prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _unshare(flags: int) -> int:
    return int(_libc().unshare(flags))


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """`mount(2)`. Raises OSError."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    if _libc().mount(*words, ctypes.c_ulong(flags), None if data is None else os.fsencode(data)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
