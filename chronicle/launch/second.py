"""The supervisor's hold on its second process, `follower`, which reads what the supervisor only copies.

    supervisor ── facts, then the end of the launch (its stdin ends) ─> follower
    follower ── what is to be said, asked for and remembered, a JSON object a line ─> supervisor

The kernel tells the supervisor of its child's death. Another one goes on where it stood: at the place in the log up to which
its points are in the metrics (`live_metrics.PrintedMetrics.state`). At the end of the launch it has a bounded time to reach the
end of the log.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from chronicle.launch.processes import signal_name

COMMAND = (sys.executable, "-P", "-m", "chronicle.launch.follower")
MOST_STARTS = 6
PAUSE_SECONDS = 1.0  # before it is started again; doubled each time
READ_BYTES = 1 << 16
LAST_SECONDS = 60.0  # for the rest of the log, after a launch that ended by itself
STOPPED_SECONDS = 5.0  # after one that was told to end: whoever told it waits


class Second:
    """Starts the follower, hears it, and starts it again. `heard` is the newest value of each thing that it says."""

    def __init__(
        self,
        facts: Mapping[str, Any],
        selector: selectors.BaseSelector,
        *,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._facts, self._selector, self._say, self._clock = facts, selector, say, clock
        self.pid: int | None = None
        self.heard: dict[str, Any] = {}
        self._stdin = self._stdout = -1
        self._rest = b""
        self._num_starts = 0
        self._due = 0.0
        self._is_over = False

    @property
    def asked(self) -> str | None:
        """Why it wants the launch to end: "proposal" or "stall"."""
        return self.heard.get("stop")

    @property
    def done(self) -> bool:
        """Whether it has read the log to its end."""
        return bool(self.heard.get("done"))

    def start(self) -> None:
        """Start it; where that fails, the launch goes on without it."""
        self._num_starts += 1
        facts = {**self._facts, "again": self._num_starts > 1, "supervisor": os.getpid()}
        try:
            child = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is the supervisor's
            )
        except OSError as problem:
            self._say(f"what is printed cannot be read as it comes: {problem}")
            self._num_starts = MOST_STARTS
            return
        assert child.stdin is not None and child.stdout is not None
        self.pid, child.returncode = child.pid, 0  # the supervisor reaps it
        self._stdin, self._stdout = os.dup(child.stdin.fileno()), os.dup(child.stdout.fileno())
        child.stdin.close()
        child.stdout.close()
        os.set_blocking(self._stdout, False)
        self._selector.register(self._stdout, selectors.EVENT_READ, self._read)
        with suppress(OSError):  # it has ended already: its end is heard of
            os.write(self._stdin, json.dumps(facts).encode() + b"\n")

    def ended(self, pid: int, code: int) -> bool:
        """Whether this child that has ended was the follower: it is to be started again, unless its work is done."""
        if pid != self.pid:
            return False
        while self._read():
            pass
        self._close()
        self.pid = None
        if self.done:
            return True
        how = f"code {code}" if code >= 0 else signal_name(-code)
        self._due = self._clock() + PAUSE_SECONDS * 2.0 ** (self._num_starts - 1)
        if self._num_starts < MOST_STARTS:
            self._say(f"the process that reads the output ended ({how}): another one goes on where it stood")
        else:
            self._say(f"the process that reads the output ended again ({how}): the rest is in the log, and nobody reads it")
        return True

    def look(self) -> None:
        """Start it again when it is due. Call once a second."""
        if self.pid is None and not self.done and self._num_starts < MOST_STARTS and self._clock() >= self._due:
            self.start()
            if self._is_over:
                self._tell_over()

    def finish(self, pump: Callable[[float], bool], *, stopped: bool) -> None:
        """The launch is over: wait until the log has been read, at most a bounded time.

        `pump(seconds)` lets the selector work and reaps; whether a signal wants it to be quick. What still reads then is ended:
        the files of the launch are sealed next.
        """
        self._is_over = True
        self._tell_over()
        deadline = self._clock() + (STOPPED_SECONDS if stopped else LAST_SECONDS)
        while not self.done and self._clock() < deadline:
            self.look()
            if self.pid is None and self._num_starts >= MOST_STARTS:
                break
            if pump(0.1):
                break
        if not self.done:
            self._say("the output was not read to its end: metrics and events of the last lines are missing; the log has them")
        if self.pid is not None and not self.done:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)  # our own child, which nobody else waits for
        self._close()

    def _tell_over(self) -> None:
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    def _read(self) -> bool:
        """Read once; whether there was anything."""
        try:
            data = os.read(self._stdout, READ_BYTES) if self._stdout >= 0 else b""
        except BlockingIOError:
            return False
        if not data and self._stdout >= 0:
            self._selector.unregister(self._stdout)
            os.close(self._stdout)
            self._stdout = -1
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._hear(line)
        return bool(data)

    def _hear(self, line: bytes) -> None:
        try:
            told = json.loads(line)
        except ValueError:
            return  # it was killed while it wrote
        said = told.pop("say", None)
        if said is not None:
            self._say(said)
        self.heard |= told

    def _close(self) -> None:
        self._tell_over()
        if self._stdout >= 0:
            self._selector.unregister(self._stdout)
            os.close(self._stdout)
            self._stdout = -1
        self._rest = b""
