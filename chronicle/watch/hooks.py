"""Commands that a person wants run when the detector speaks: one a tier, started beside the watch, never waited for.

A hook gets the event as JSON on its standard input and in CHRONICLE_EVENT, its main facts in CHRONICLE_EVENT_KIND,
_TIER, _STATUS, _ONSET, _CHANNELS. What it prints goes to standard error. One that fails is said and changes nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping

from rollback.detect import Event

AT_ONCE = 8  # hooks that may run beside each other: one that hangs must not become a thousand
WAIT_SECONDS = 10.0  # at the end of a watch


class Hooks:
    """`call` starts the command of the event's tier, once for each tier that an event reaches."""

    def __init__(self, commands: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._commands, self._say = commands, say
        self._called: set[tuple[int, str]] = set()
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []

    def call(self, event: Event) -> None:
        """Start the hook; never raises."""
        name = f"on_{event.tier.value}"
        command, key = self._commands.get(name), (event.id, event.tier.value)
        self.reap()
        if not command or key in self._called:
            return
        self._called.add(key)
        if len(self._running) >= AT_ONCE:
            self._say(f"hook {name} is not started: {AT_ONCE} of them still run")
            return
        try:
            self._running.append((name, _start(command, event)))
        except OSError as problem:
            self._say(f"hook {name} cannot be started: {problem}")

    def reap(self) -> None:
        """Say of those that have ended whether they failed."""
        for name, process in [item for item in self._running if item[1].poll() is not None]:
            self._running.remove((name, process))
            if process.returncode:
                self._say(f"hook {name} ended with code {process.returncode}")

    def finish(self, seconds: float = WAIT_SECONDS) -> None:
        """The watch ends: wait a little for what still runs, and leave what does not end alone."""
        until = time.monotonic() + seconds
        while self._running and time.monotonic() < until:
            self.reap()
            time.sleep(0.02)
        for name, process in self._running:
            self._say(f"hook {name} still runs as process {process.pid}")


def _start(command: str, event: Event) -> subprocess.Popen[bytes]:
    record = json.dumps(event.to_json())
    facts = {"KIND": event.kind.value, "TIER": event.tier.value, "ONSET": str(event.onset_step),
             "CHANNELS": ",".join(event.channels), "STATUS": event.status.value}  # fmt: skip
    environ = os.environ | {"CHRONICLE_EVENT": record} | {f"CHRONICLE_EVENT_{name}": text for name, text in facts.items()}
    # The command comes from the person's own settings or flags: a shell line is what it is meant to be.
    process = subprocess.Popen(  # noqa: S602
        command, shell=True, env=environ, stdin=subprocess.PIPE, stdout=2, start_new_session=True
    )
    assert process.stdin is not None
    try:
        process.stdin.write(record.encode() + b"\n")
        process.stdin.close()
    except OSError:
        pass  # it has ended without reading
    return process
