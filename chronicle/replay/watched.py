"""What a replay's processes took from outside: every file that they opened, whoever they connected to, what they started.

Step prints know what Python read. A library in C maps files, a script asks a server, a program prints an answer, somebody looks
whether a file is there: none of it is in the record. So a replay runs under a filter of system calls (`seccomp`): each `open`,
`stat`, `access`, `readlink`, `connect`, `exec`, `rename`, `statfs` and `shmget` of it and of all its children is told to this
process, and goes on. `unrecorded` then says what may have been otherwise in the record: a file is as it was where its digest is
known or it is older than the launch, a name where its directory is, or was written down (`Then`).

What the script's own code asks in Python (load, memory, ids, random numbers of the system, variables) is told by
`launch/startup/asks.py`; the clock is `launch/startup/other_clock.py`. Linux only; where the kernel gives no such filter, that
is said, and nothing is taken to be known.
"""

import ctypes
import fcntl
import json
import os
import platform
import re
import select
import signal
import socket
import stat
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from chronicle.paths import UNWATCHED
from chronicle.replay.sandbox import end_with_parent
from chronicle.resume.installed import InstalledPackages
from chronicle.resume.launch_facts import ITS_OWN, OWN, PACKAGES, born, is_outside, places_of_packages, places_outside

__all__ = ["IS_NEWER", "Then", "answers_to_vary", "is_born_within", "unrecorded", "variables_read", "watched"]

IS_NEWER = "is newer than the launch, and its content of then is not known"  # ends what is said of a file
# number of each system call, of this one, and the machine's number in the filter
X86: Final = {"open": 2, "creat": 85, "openat": 257, "openat2": 437, "connect": 42, "execve": 59, "execveat": 322, "shmget": 29,
              "rename": 82, "renameat": 264, "renameat2": 316, "stat": 4, "lstat": 6, "access": 21, "readlink": 89,
              "newfstatat": 262, "statx": 332, "faccessat": 269, "faccessat2": 439, "readlinkat": 267, "mkdir": 83,
              "mkdirat": 258, "symlink": 88, "symlinkat": 266, "link": 86, "linkat": 265, "statfs": 137}  # fmt: skip
ARM: Final = {"openat": 56, "openat2": 437, "connect": 203, "execve": 221, "execveat": 281, "shmget": 194, "renameat": 38,
              "renameat2": 276, "newfstatat": 79, "statx": 291, "faccessat": 48, "faccessat2": 439, "readlinkat": 78,
              "mkdirat": 34, "symlinkat": 36, "linkat": 37, "statfs": 43}  # fmt: skip
# let through: imports (`launch/startup/asks.py`), and what is known by its descriptor alone; place of the flags
PASSED_BY: Final = {"openat": None, "newfstatat": 3, "statx": 2, "readlinkat": None}
MACHINES: Final = {"x86_64": (X86, 317, 0xC000003E), "aarch64": (ARM, 277, 0xC00000B7)}
NO_NEW_PRIVS, SET_FILTER, NEW_LISTENER = 38, 1, 8
LOAD, EQUAL, HOLDS, RETURN = 0x20, 0x15, 0x45, 0x06
EMPTY_PATH, PATH_ONLY = 0x1000, 0x200000
ALLOW, NOTIFY = 0x7FFF0000, 0x7FC00000
RECEIVE, SEND, CONTINUE = 0xC0502100, 0xC0182101, 1
NOTICE, ANSWER = struct.Struct("QIIiIQ6Q"), struct.Struct("QqiI")
LEAST_KERNEL = (5, 5)  # lets a call go on
AT_FDCWD = (-100) & 0xFFFFFFFF
MARK, VARIED, VARIABLE = "/.chronicle-asked/", "varied: ", "variable "  # as in `launch/startup/asks.py`
MOST_READ = 32
LONGEST = 4096
NEAR = 50_000_000  # ns between the birth of a directory and the change of the one above it

# what every process of a machine reads, and what has no content that is kept
OF_THE_MACHINE = re.compile(
    r"/proc/.*|/sys/(devices/system|fs/cgroup|kernel/mm|bus|class/(infiniband|net|drm)|module|hypervisor)(/.*)?"
    r"|/dev/(null|zero|full|tty|ptmx|pts/.*|u?random|console|nvidia.*|kfd|dri/.*|infiniband/.*|fuse|std(in|out|err)|fd/.*)"
)
CACHES = re.compile(
    r".*\.pyc(\.\d+)?|/(var/)?tmp/torchinductor_[^/]*/.*|.*/\.triton/.*|.*/torch_extensions/.*|/dev/shm/(torch_|sem\.).*"
)
# what it tells is another value at every look
VOLATILE = re.compile(
    r"/proc/(loadavg|meminfo|stat|vmstat|uptime|diskstats|swaps|net/.*|pressure/.*|sys/(kernel/random|fs)/.*)"
    r"|/sys/class/(thermal|hwmon|power_supply)/.*|/sys/class/net/.*/statistics/.*"
)
TELL_OF_THE_MACHINE = re.compile(r"python[\d.]*|lscpu|lspci|nproc|getconf|nvidia-smi|rocm-smi|git|ldconfig(\.real)?|gcc.*")
NOT_LOOKED_AT = re.compile(r"/((proc|sys|dev(?!/shm)|usr|lib|lib32|lib64|bin|sbin|etc)(/.*)?)?")
OF_SOURCES = re.compile(r".*\.py|.*__path_hook__")
NAME_SERVICES = re.compile(r"(/var)?/run/(nscd/socket|systemd/.*|dbus/.*|nvidia-.*)|.*/nvidia-mps/.*|/dev/log|.*:53")
# programs whose answer is made of files and arguments, or tells of the machine
KNOWN_PROGRAMS = re.compile(
    r"python[\d.]*|chronicle|torchrun|accelerate|deepspeed|(ba|da|z)?sh|env|nice|timeout|taskset|numactl|stdbuf|cat|echo|printf|test|true|"
    r"false|ls|head|tail|grep|sed|awk|gawk|mawk|cut|tr|wc|sort|uniq|find|xargs|basename|dirname|readlink|mkdir|rm|cp|mv|touch|ln|"
    r"tee|sleep|git|which|uname|hostname|nproc|lscpu|lspci|ldconfig(\.real)?|fc-list|fc-match|nvidia-smi|rocm-smi|getconf|id|"
    r"(x86_64-linux-gnu-|aarch64-linux-gnu-)?(gcc|g\+\+|cc|c\+\+|clang|clang\+\+|ld|as|collect2|cc1|cc1plus|ar|objdump)(-[\d.]+)?|"
    r"ninja|nvcc|ptxas|cuobjdump|addr2line"
)


# ---- in the sandbox ----------------------------------------------------------------------------------------------------


def watched(work: Callable[[], int], told: Path) -> int:
    """Run `work` in a process of its own under the filter, and write to `told` what it took from outside. Returns its code."""
    ours, its = socket.socketpair()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ours.close()
            end_with_parent()
            _let_watch(its)
            code = work()
        finally:
            os._exit(code)
    its.close()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.kill(child, signal.SIGTERM))
    said, listeners, _, _ = socket.recv_fds(ours, 200, 1)
    seen = _Seen(child, told.parent.parent)
    if listeners:
        _listen(listeners[0], child, seen)
        os.close(listeners[0])
    status = os.waitpid(child, 0)[1]
    told.write_text(json.dumps(seen.to_json(said.decode() if not listeners else "")), encoding="utf-8")
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _let_watch(channel: socket.socket) -> None:
    """Put this process under the filter and hand its descriptor over; without one, why."""
    libc = ctypes.CDLL(None, use_errno=True)
    if platform.machine() not in MACHINES or _kernel() < LEAST_KERNEL:
        channel.send(f"Linux {platform.release()} on {platform.machine()}".encode())
        return
    calls, own, machine = MACHINES[platform.machine()]
    rows = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, machine), (RETURN, 0, 0, ALLOW), (LOAD, 0, 0, 0)]
    for name, number in calls.items():
        block = [(RETURN, 0, 0, NOTIFY)]
        if name in PASSED_BY:
            block = [(LOAD, 0, 0, 16), (EQUAL, 0, 1, UNWATCHED), (RETURN, 0, 0, ALLOW), *block]
        if (place := PASSED_BY.get(name)) is not None:
            block = [(LOAD, 0, 0, 16 + 8 * place), (HOLDS, 0, 1, EMPTY_PATH), (RETURN, 0, 0, ALLOW), *block]
        rows += [(EQUAL, 0, len(block), number), *block]
    rows += [(RETURN, 0, 0, ALLOW)]
    body = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rows), ctypes.addressof(body)))
    listener = libc.syscall(own, SET_FILTER, NEW_LISTENER, program)
    if listener < 0:  # without privileges it is given only to who gives up new ones
        libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
        listener = libc.syscall(own, SET_FILTER, NEW_LISTENER, program)
    if listener < 0:
        channel.send(f"seccomp: {os.strerror(ctypes.get_errno())}".encode())
        return
    # no import from here on: nobody answers yet
    channel.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", listener))])
    os.close(listener)


def _kernel() -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", platform.release())[:2])


def _listen(listener: int, child: int, seen: "_Seen") -> None:
    """Take note of every call until the child has ended; an error of ours never keeps a call from going on."""
    names = {number: name for name, number in MACHINES[platform.machine()][0].items()}
    poll = select.poll()
    ended = os.pidfd_open(child)
    poll.register(listener, select.POLLIN)
    poll.register(ended, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if ended in ready or ready.get(listener, 0) & ~select.POLLIN:
            break
        notice = bytearray(NOTICE.size)
        try:
            fcntl.ioctl(listener, RECEIVE, notice)
        except OSError:
            continue  # it was killed meanwhile
        number, pid, _, call, _, _, *arguments = NOTICE.unpack(notice)
        try:
            seen.call(names.get(call, ""), pid, arguments)
        except (OSError, ValueError):
            pass  # its memory is gone
        try:
            fcntl.ioctl(listener, SEND, bytearray(ANSWER.pack(number, 0, 0, CONTINUE)))
        except OSError:
            continue
    os.close(ended)


class _Seen:
    """What was opened, looked at, connected to and started so far. `ours`: the process that starts and supervises, and what
    it keeps."""

    def __init__(self, ours: int, kept: Path) -> None:
        self.ours, self.kept = ours, str(kept)
        self.read: dict[str, None] = {}
        self.looked: dict[str, bool] = {}  # whether its names were listed
        self.asked: dict[str, None] = {}
        self.written: set[str] = set()
        self.peers: dict[str, bool] = {}  # whether it is a process of the replay
        self.programs: dict[str, None] = {}
        self.shared = False

    def to_json(self, why: str) -> dict[str, Any]:
        """As it is written; `why` nothing was watched."""
        outside = [peer for peer, inside in self.peers.items() if not inside]
        found = {"why": why, "read": list(self.read), "peers": outside, "programs": list(self.programs), "shared": self.shared}
        return {**found, "looked": self.looked, "asked": list(self.asked)}

    def call(self, name: str, pid: int, arguments: Sequence[int]) -> None:
        """One call of a process. Raises OSError or ValueError where its memory cannot be read."""
        one, two, three, four, *_ = arguments
        if name in ("newfstatat", "statx", "faccessat", "faccessat2", "readlinkat"):
            self._looks(pid, _path(pid, one, two))
        elif name in ("stat", "lstat", "access", "readlink"):
            self._looks(pid, _path(pid, AT_FDCWD, one))
        elif name in ("open", "creat"):
            self._opens(pid, _path(pid, AT_FDCWD, one), two if name == "open" else os.O_WRONLY)
        elif name == "openat":
            self._opens(pid, _path(pid, one, two), three)
        elif name == "openat2":
            self._opens(pid, _path(pid, one, two), struct.unpack("Q", _memory(pid, three, 8))[0])
        elif name in ("mkdir", "mkdirat"):
            self._makes(_path(pid, AT_FDCWD, one) if name == "mkdir" else _path(pid, one, two))
        elif name in ("symlink", "symlinkat", "link", "linkat"):
            at = {"symlinkat": two, "linkat": three}.get(name, AT_FDCWD)
            self._makes(_path(pid, at, {"symlinkat": three, "linkat": four}.get(name, two)))
        elif name == "statfs" and not NOT_LOOKED_AT.fullmatch(_path(pid, AT_FDCWD, one)):
            self._asks(pid, "the room on a disk")
        elif name == "rename":
            self._renames(_path(pid, AT_FDCWD, one), _path(pid, AT_FDCWD, two))
        elif name in ("renameat", "renameat2"):
            self._renames(_path(pid, one, two), _path(pid, three, four))
        elif name in ("execve", "execveat"):
            path = _path(pid, AT_FDCWD, one) if name == "execve" else _path(pid, one, two)
            if os.path.exists(path):
                self._starts(path)
        elif name == "connect":
            self._connects(_memory(pid, two, min(three, 128)))
        elif name == "shmget" and one != 0:  # not IPC_PRIVATE
            self.shared = True

    def _opens(self, pid: int, path: str, flags: int) -> None:
        if flags & PATH_ONLY:
            return self._looks(pid, path)
        if flags & os.O_DIRECTORY:
            return self._looks(pid, path, listed=True)
        if VOLATILE.fullmatch(path):
            return self._asks(pid, f"`{path}`")
        if OF_THE_MACHINE.fullmatch(path):
            return
        is_there = path in self.read or os.path.exists(path)
        if flags & os.O_WRONLY or (flags & os.O_RDWR and (flags & os.O_TRUNC or not is_there)):
            self.written.add(path)
        elif is_there and path not in self.written and os.path.isdir(path):
            self._looks(pid, path, listed=True)
        elif is_there and path not in self.written:
            self.read[path] = None
        elif not is_there:
            self._looks(pid, path)

    def _looks(self, pid: int, path: str, *, listed: bool = False) -> None:
        """Somebody looks whether this is there, what it is, or (`listed`) which names are in it."""
        if path.startswith(MARK):
            self.asked[path[len(MARK) :].replace("|", "/")] = None
        elif listed and path == "/proc":
            self._asks(pid, "which processes there are")
        elif not (self.looked.get(path) or (path in self.looked and not listed) or self._is_passed(path) or self._is_ours(pid)):
            self.looked[path] = listed

    def _is_passed(self, path: str) -> bool:
        """Whether it is the machine's, the sandbox's, a cache's, or was made here."""
        if path in self.written or path in self.read or path.startswith(self.kept):
            return True
        if NOT_LOOKED_AT.fullmatch(path) or CACHES.fullmatch(path):
            return True
        return any(str(above) in self.written for above in Path(path).parents)

    def _makes(self, path: str) -> None:
        if not os.path.lexists(path):
            self.written.add(path)

    def _asks(self, pid: int, what: str) -> None:
        """A program asks the machine; what asks in Python is told by `asks.py`."""
        if not TELL_OF_THE_MACHINE.fullmatch(os.path.basename(os.readlink(f"/proc/{pid}/exe"))):
            self.asked[f"{what} (by a program)"] = None

    def _is_ours(self, pid: int) -> bool:
        """Whether this is the process that supervises, or git at its side."""
        told = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
        return int(told["Tgid"]) == self.ours or (told["Name"] == "git" and int(told["PPid"]) == self.ours)

    def _renames(self, before: str, after: str) -> None:
        if before in self.written:
            self.written.add(after)

    def _starts(self, path: str) -> None:
        name = os.path.basename(path)
        if not KNOWN_PROGRAMS.fullmatch(name):
            self.programs[name] = None

    def _connects(self, address: bytes) -> None:
        family = struct.unpack_from("H", address)[0]
        if family == socket.AF_UNIX:
            name = address[2:]
            peer = "@" + os.fsdecode(name[1:].rstrip(b"\0")) if name[:1] == b"\0" else os.fsdecode(name.split(b"\0")[0])
            inside = bool(peer) and _listens(_unix_sockets(peer))
        elif family in (socket.AF_INET, socket.AF_INET6):
            four = family == socket.AF_INET
            port = struct.unpack_from("!H", address, 2)[0]
            host = socket.inet_ntop(family, address[4:8] if four else address[8:24])
            peer = f"{host}:{port}"
            inside = port == 0 or (_is_here(family, host) and _listens(_tcp_sockets(port)))
        else:
            return
        if not NAME_SERVICES.fullmatch(peer):
            self.peers[peer] = self.peers.get(peer, False) or inside


def _memory(pid: int, address: int, size: int) -> bytes:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(size)


def _path(pid: int, directory: int, address: int) -> str:
    text = b""
    while b"\0" not in text and len(text) < LONGEST:  # a page at a time: the next may not be there
        text += _memory(pid, address + len(text), LONGEST - (address + len(text)) % LONGEST)
    name = os.fsdecode(text.split(b"\0")[0])
    if name.startswith("/"):
        return os.path.normpath(name)
    number = directory & 0xFFFFFFFF
    base = os.readlink(f"/proc/{pid}/cwd" if number == AT_FDCWD else f"/proc/{pid}/fd/{number}")
    return os.path.normpath(os.path.join(base, name))


def _is_here(family: int, host: str) -> bool:
    """Whether an address is this machine's own."""
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((host, 0))
        except OSError:
            return False
    return True


def _tcp_sockets(port: int) -> set[str]:
    """The sockets that listen on a port."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        rows = [line.split() for line in Path(table).read_text().splitlines()[1:]] if os.path.exists(table) else []
        found |= {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    return found


def _unix_sockets(name: str) -> set[str]:
    rows = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()[1:]]
    return {row[6] for row in rows if len(row) == 8 and row[7] == name}


def _listens(sockets: set[str]) -> bool:
    """Whether a process of the replay holds one of these sockets: in its own process namespace `/proc` shows no others."""
    if not sockets or os.getppid() != 1:
        return False
    wanted = {f"socket:[{number}]" for number in sockets}
    for entry in os.listdir("/proc"):
        try:
            numbers = os.listdir(f"/proc/{entry}/fd") if entry.isdecimal() else []
        except OSError:
            continue
        for number in numbers:
            try:
                if os.readlink(f"/proc/{entry}/fd/{number}") in wanted:
                    return True
            except OSError:
                continue
    return False


# ---- afterwards --------------------------------------------------------------------------------------------------------


def unrecorded(
    seen: Mapping[str, Any] | None, then: "Then", after: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """What a replay took from outside, and of which nobody knows what it was in the record; in words.

    `after`: the replay's facts.
    """
    if seen is None or seen.get("why"):
        yield f"what its processes read was not watched ({(seen or {}).get('why') or 'the watch ended'})"
        return
    yield from (f"what came from `{peer}` is in no record" for peer in seen["peers"])
    yield from (f"what `{program}` put out is in no record" for program in seen["programs"])
    if seen["shared"]:
        yield "what lay in shared memory is in no record"
    facts, named, begun, ended = then.facts, then.named, then.begun, then.ended
    hubs = tuple(os.path.expanduser(f"~/.cache/{name}/") for name in ("huggingface", "torch/hub"))
    machine, packages = places_outside(then.own), InstalledPackages()
    for path in seen["read"]:
        if path in named and not path.endswith(".py"):
            yield from _other_times(path, begun, ended)
        if path in named or CACHES.fullmatch(path) or (is_outside(path, machine) and not path.startswith(hubs)):
            continue
        try:
            found = os.stat(path)
        except OSError:
            continue  # it was made in the replay
        if not stat.S_ISREG(found.st_mode):
            yield f"what was read from `{path}` is in no record"
        elif path.startswith("/dev/shm/"):
            yield f"what lay in shared memory (`{path}`) is in no record"
        elif _is_newer(found.st_ctime, begun, ended if then.is_made(path) else None) and not packages.is_as_installed(path):
            yield f"`{path}`, which is read, {IS_NEWER}"
    yield from (why for path, listed in seen.get("looked", {}).items() if (why := then.doubt(path, listed)))
    told, now = facts.get("packages") or {}, (after or {}).get("packages") or {}
    newer = packages.newer_than(begun, seen["read"], told, now)
    yield from (f"package `{name}` is newer than the launch" for name in newer if name not in OWN)
    aside, aside_now = (facts.get("aside") or {}, (after or {}).get("aside") or {})
    for what in seen.get("asked", ()):
        name = what.removeprefix(VARIABLE)
        if name == what and not what.startswith(VARIED):
            yield f"{what}, for which it asks, is in no record"
        elif name != what and aside.get(name) != aside_now.get(name):
            yield f"variable `{name}`, which it reads, is another"


def answers_to_vary(seen: Mapping[str, Any] | None) -> tuple[str, ...]:
    """What the script asks of the machine, and other replays can answer otherwise."""
    return tuple(what.removeprefix(VARIED) for what in (seen or {}).get("asked", ()) if what.startswith(VARIED))


def variables_read(seen: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The variables that the script's own code reads; none where it reads so many that it copies or prints them all."""
    found = tuple(what.removeprefix(VARIABLE) for what in (seen or {}).get("asked", ()) if what.startswith(VARIABLE))
    return found if len(found) <= MOST_READ else ()


class Then:
    """What is known of files, names and times as they were in the record.

    `begun`, `ended`: the recorded launch, in seconds since the epoch. `stepped`: when it logged its first step, or None. `own`:
    directories of the run and its checkpoints.
    """

    def __init__(
        self, facts: Mapping[str, Any], begun: float, ended: float | None, own: Sequence[str], stepped: float | None = None
    ) -> None:
        self.facts, self.begun, self.ended, self.stepped = facts, begun, ended, stepped
        self.own = tuple(os.path.realpath(path) for path in own)
        self.passed = (*places_of_packages(), os.path.expanduser("~/."))
        later = {path: digest for path, _, digest in facts.get("later", ())}
        mine = {path for path, digest in later.items() if digest == ITS_OWN}
        self.made = {*facts.get("written", ()), *mine}
        self.named = {*facts.get("files", {}), *facts.get("code", {}), *(later.keys() - mine)}
        self.hidden: set[str] = set()
        around = facts.get("around") or {}
        self.directory: str | None = around.get("directory")
        self.names: Sequence[str] | None = around.get("names")
        self.is_same = self.names is not None and self._is_unchanged(around)

    def _is_unchanged(self, around: Mapping[str, Any]) -> bool:
        """Whether no name in the working directory came or went since the first step, but for what is the run's own."""
        now = _changed(self.directory) or 0
        return now == around.get("changed") or any(
            os.path.dirname(path) == self.directory and 0 <= now - (born(path) or 0) < NEAR
            for path in (*self.own, *self.made)
        )

    def is_made(self, path: str) -> bool:
        """Whether the launch wrote this: as the record says, or it came before the first step and is as it was since.

        A library in C that wrote a cache is in no record. The second replay goes without it, as the launch did.
        """
        if path in self.made:
            return True
        if self.stepped is None or not path.startswith(f"{self.directory}{os.sep}") or path.endswith((".py", ".pyc")):
            return False
        return is_born_within(path, self.begun, self.stepped) and os.stat(path).st_ctime <= self.stepped

    def made_meanwhile(self, seen: Mapping[str, Any] | None, directory: Path) -> Iterator[str]:
        """What the launch made in its directory and the replay has looked at: in the record it was not there at first.

        A directory that the launch made goes as a whole, unless it leads to what is the run's own.
        """
        here = (str(directory) + os.sep, os.path.realpath(directory) + os.sep)
        asked = {path for path in (*(seen or {}).get("looked", ()), *(seen or {}).get("read", ())) if path.startswith(here)}
        above = {str(one) for path in asked for one in Path(path).parents if str(one).startswith(here)}
        for path in sorted(asked | above):  # a directory comes before what is in it
            if path.endswith((".py", ".pyc")) or self.is_own(real := os.path.realpath(path)) or self._leads_to_own(real):
                continue
            is_known = path in self.named or os.path.isdir(real) or self.is_made(path)
            if is_known and is_born_within(path, self.begun, self.ended) and not self._is_below_hidden(path):
                self.hidden.add(path)
                yield path

    def _is_below_hidden(self, path: str) -> bool:
        return any(path == one or path.startswith(one + os.sep) for one in self.hidden)

    def is_own(self, path: str) -> bool:
        """Whether it is the run's or a checkpoint's."""
        return any(path == one or path.startswith(one + os.sep) for one in self.own)

    def _leads_to_own(self, real: str) -> bool:
        return any(one.startswith(real + os.sep) for one in self.own)

    def doubt(self, path: str, listed: bool) -> str:
        """Why it is not known what somebody who looked at this saw in the record, "" where it is."""
        if path.startswith(self.passed) or self._is_below_hidden(path):
            return ""
        real = os.path.realpath(path)
        try:
            found = os.stat(path)
        except OSError:
            return self._of_absent(path)
        if path in self.named or self.is_own(real) or (not listed and self._leads_to_own(real)):
            return ""
        if not stat.S_ISDIR(found.st_mode):
            if not _is_newer(found.st_ctime, self.begun, self.ended if self.is_made(path) else None):
                return ""
            return f"`{path}`, which is looked at, is newer than the launch"
        if listed:
            is_same = found.st_ctime <= self.begun or real == str(PACKAGES) or self._has_names(real)
            return "" if is_same else f"names in `{path}` may have been others"
        made = born(path)
        if found.st_ctime <= self.begun or real == self.directory or (made is not None and made <= self.begun * 1e9):
            return ""
        return f"`{path}`, which is looked at, is newer than the launch"

    def _of_absent(self, path: str) -> str:
        name, above = path, os.path.dirname(path)
        while not os.path.isdir(above):
            name, above = above, os.path.dirname(above)
        if self.is_own(os.path.realpath(path)) or os.stat(above).st_ctime <= self.begun:
            return ""
        if os.path.realpath(above) == self.directory and self.names is not None:
            if os.path.basename(name) in self.names:
                return f"`{path}` was there when the launch began"
            if self.is_same or OF_SOURCES.fullmatch(path):  # a source that was read is known, and named when it is gone
                return ""
        return f"`{path}`, which is looked for, may have been there"

    def _has_names(self, real: str) -> bool:
        """Whether the working directory has the names that it had, and those that are the run's own."""
        if real != self.directory or self.names is None or not self.is_same:
            return False
        mine = (path for path in (*self.own, *self.made, *self.hidden) if os.path.dirname(path) == real)
        own = {os.path.basename(path) for path in mine} | {"__pycache__"}
        now = set(os.listdir(real))
        return now - own == set(self.names) - own


def _changed(directory: str | None) -> int | None:
    try:
        return os.stat(directory or "").st_ctime_ns
    except OSError:
        return None


def is_born_within(path: str, begun: float | None, ended: float | None) -> bool:
    """Whether a file or directory was made after `begun`, and not after `ended` if that is known (seconds since the epoch)."""
    found = born(path)
    return found is not None and begun is not None and begun * 1e9 < found and (ended is None or found <= ended * 1e9)


def _other_times(path: str, begun: float, ended: float | None) -> Iterator[str]:
    """A file that holds what it held: who goes by its age, or by the order of changes, has another one."""
    try:
        changed = os.stat(path).st_ctime
    except OSError:
        return
    if changed > begun and not (ended is not None and changed <= ended):
        yield f"`{path}` has other times than when the launch read it"


def _is_newer(changed: float, begun: float, ended: float | None) -> bool:
    """Whether a file changed after the launch began. `ended`: the launch wrote it, and that is no change of it."""
    return changed > (begun if ended is None else ended)
