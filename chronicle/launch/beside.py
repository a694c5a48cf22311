"""A process beside a launch, which neither the training nor its supervisor waits for: it feeds MLflow, or sends alerts.

It is forked twice, so it is not our child: a supervisor that ends or waits for its descendants leaves it alone. Its stdin is a
pipe whose end means that the launch is over, which also happens when we are killed.
"""

import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Beside:
    """Handle of such a process; `pid` is None when there is none."""

    pid: int | None = None
    stdin_fd: int | None = None  # closing it tells the process to finish

    def stop(self, timeout_seconds: float = 3.0) -> bool:
        """Tell the process to end after a last pass; return whether it ended in time.

        The process is not killed: MLflow may be creating its tables, and a partial set makes the store unusable. It ends
        by itself, at the latest after the limit that it gave itself.
        """
        pid, stdin_fd, self.pid, self.stdin_fd = self.pid, self.stdin_fd, None, None
        if pid is None or stdin_fd is None:
            return True
        try:
            process = os.pidfd_open(pid)
        except OSError:
            os.close(stdin_fd)
            return True  # it has ended already
        os.close(stdin_fd)
        try:
            ended = select.poll()  # not `select`: it refuses descriptors from 1024 on
            ended.register(process, select.POLLIN)
            return bool(ended.poll(timeout_seconds * 1000))
        finally:
            os.close(process)


def start_beside(
    words: Sequence[str], environ: Mapping[str, str], *, what: str, later: str, talk: Callable[[str], None]
) -> Beside:
    """Start such a process. A failure is reported in one line that says how to do it `later`, and does not raise."""
    told, tell = os.pipe()
    stdin, stdin_fd = os.pipe()

    def leave() -> None:
        pid = os.fork()
        if pid:
            os.write(tell, str(pid).encode())
            os._exit(0)
        os.nice(10)

    try:
        between = subprocess.Popen(
            words, stdin=stdin, stdout=subprocess.DEVNULL, env=dict(environ), preexec_fn=leave, start_new_session=True
        )
        between.wait()
        pid = int(os.read(told, 32))
    except (OSError, ValueError, subprocess.SubprocessError) as problem:
        os.close(stdin_fd)
        talk(f"cannot start {what}: {problem}; {later}")
        return Beside()
    finally:
        for fd in (told, tell, stdin):
            os.close(fd)
    return Beside(pid, stdin_fd)


def wait_for_end(over: threading.Event, last_pass_seconds: int) -> None:
    """In such a process, in a thread: set `over` when the launch has ended. What then takes longer than that is ended."""
    while os.read(0, 1 << 12):
        pass
    signal.alarm(last_pass_seconds)
    over.set()
