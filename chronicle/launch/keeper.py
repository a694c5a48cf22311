"""The process above the supervisor of an unattended run. It waits, and where the supervisor is killed it starts another one.

    keeper ── supervisor ── launcher ── ranks
       └── the supervisor was ended by a signal: another one ends what it left, writes its end and decides about going on

A parent hears from the kernel which child ended, and how: nothing is concluded from the age of a heartbeat. The keeper holds
no file, starts no thread and reads nothing, so that little can happen to it; where it is killed itself, the supervisor goes on.
As pid 1 of a container it reaps what others leave.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from chronicle.launch.containment import become_subreaper
from chronicle.launch.processes import signal_name
from chronicle.launch.supervisor import FORWARDED, TAKEN_AS_TERM

PASSED_ON = (*FORWARDED, *TAKEN_AS_TERM)
BY_THE_KERNEL = 0x80  # si_code SI_KERNEL: from the terminal, whose whole process group has it


class Killed(NamedTuple):
    """The supervisor that a signal ended."""

    pid: int
    signal: int

    @property
    def name(self) -> str:
        """Such as "SIGKILL"."""
        return signal_name(self.signal)


def keep_supervised(
    work: Callable[[Killed | None], int],
    *,
    most: int,
    pause_seconds: float,
    say: Callable[[str], None],
    explain: Callable[[BaseException], int],
) -> int:
    """Run `work` in a child process, and again while a signal ends it, at most `most` times more; its exit code.

    `work(None)` is the first one; each further one is told which process it stands in for. Signals are passed on; a child
    that ends by a signal that was passed on is not replaced. `explain` turns an error of `work` into an exit code.
    """
    become_subreaper()
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*PASSED_ON, signal.SIGCHLD))
    killed: Killed | None = None
    try:
        while True:
            child = _start(work, killed, before, explain)
            code, asked = _wait(child)
            if code >= 0 or asked or most <= 0:
                return code if code >= 0 else 128 - code
            killed, most = Killed(child, -code), most - 1
            say(f"the supervisor ({child}) was ended by {killed.name}; another one takes over")
            time.sleep(pause_seconds)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(
    work: Callable[[Killed | None], int],
    killed: Killed | None,
    mask: Iterable[int],
    explain: Callable[[BaseException], int],
) -> int:
    child = os.fork()
    if child != 0:
        return child
    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            code = work(killed)
        except BaseException as problem:  # noqa: BLE001 nothing may return into the caller's frames a second time
            code = explain(problem)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wait(child: int) -> tuple[int, bool]:
    """The child's exit code, negative for a signal, and whether a signal was passed on to it."""
    asked = False
    while True:
        got = signal.sigwaitinfo((*PASSED_ON, signal.SIGCHLD))
        if got.si_signo == signal.SIGCHLD:
            code = _reap(child)
            if code is not None:
                return code, asked
        elif got.si_code != BY_THE_KERNEL or got.si_signo == signal.SIGHUP:
            asked = True
            os.kill(child, got.si_signo)


def _reap(child: int) -> int | None:
    """Collect all that have ended; the exit code of `child` if it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = os.waitstatus_to_exitcode(status)
