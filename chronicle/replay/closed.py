"""Stands in front of a replay's launch: `python -m chronicle.replay.closed SPEC WORDS…` closes doors, then becomes WORDS.

The network: an empty namespace with loopback, where the kernel gives one (to others than root inside of a user namespace). The
files: by Landlock nothing is written but below the directories that SPEC names; reading stays free. A kernel without Landlock
closes no files. No mount is made, and no system call is filtered. KILL for the process that started it is TERM for this one.
"""

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterable

from chronicle.errors import Refusal

NEWUSER, NEWNET = 0x10000000, 0x40000000
SIOCSIFFLAGS, SIOCSIFADDR, UP_AND_RUNNING = 0x8914, 0x8916, 0x41
PDEATHSIG, NO_NEW_PRIVILEGES = 1, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the numbers of Landlock's calls, on every kind of processor
VERSION_ASKED, PATH_BENEATH = 1, 1
# Writing, removing, making; with its second version renaming to another directory, with its third truncating
WRITES = {1: 0x1FF2, 2: 0x3FF2, 3: 0x7FF2}


def main() -> None:
    """Close, and become the words. `network` true in SPEC leaves it open; `parent` is the process that started this one."""
    spec = json.loads(sys.argv[1])
    _libc().prctl(PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != spec["parent"]:
        sys.exit("the replay was ended before its launch began")
    if not spec["network"]:
        _close_network()
    _close_files(spec["writable"])
    os.execvp(sys.argv[2], sys.argv[2:])


def ensure_network_closes() -> None:
    """Raise `Refusal` where this user gets no network namespace."""
    child = os.fork()
    if child == 0:
        os._exit(0 if _new_network() else 1)
    if os.waitpid(child, 0)[1] != 0:
        raise Refusal(
            "no private network namespace for this user (unshare: not permitted): the script would reach the network",
            "--network lets it: what it uploads or deletes there is done again",
        )


def landlock_version() -> int:
    """The version of the kernel's Landlock; 0 without it."""
    return max(0, int(_libc().syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION_ASKED)))


def _new_network() -> bool:
    uid, gid = os.getuid(), os.getgid()
    if _libc().unshare(NEWNET) == 0:
        return True
    if _libc().unshare(NEWUSER | NEWNET) != 0:
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    return True


def _close_network() -> None:
    """Loopback alone; this host's own address is there too, because launchers ask for its name."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"
    if not _new_network():
        sys.exit("no private network namespace for this user")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        fcntl.ioctl(asked, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", UP_AND_RUNNING))
        if not address.startswith("127."):
            fcntl.ioctl(asked, SIOCSIFADDR, struct.pack("16sH2x4s16x", b"lo:0", socket.AF_INET, socket.inet_aton(address)))


def _close_files(writable: Iterable[str]) -> None:
    """From now on this process and its children write below these directories alone."""
    version = landlock_version()
    if version == 0:
        return
    writes = WRITES[min(version, max(WRITES))]
    rules = _call(CREATE_RULESET, struct.pack("Q", writes), ctypes.c_size_t(8), 0)
    for path in writable:
        directory = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _call(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", writes, directory), 0)
        os.close(directory)
    _libc().prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call(RESTRICT_SELF, rules, 0)
    os.close(rules)


def _call(number: int, *arguments: object) -> int:
    """A system call. Raises OSError."""
    found = int(_libc().syscall(number, *arguments))
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


if __name__ == "__main__":
    main()
