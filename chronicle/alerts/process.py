"""The process that sends a run's alerts, beside a launch: it reads the journal when it has grown, and sends what is due.

It ends some time after the launch has ended and nothing is left to send, at the latest after LAST_PASS_SECONDS; what is left
then is for the next launch, or for `chronicle alerts --send`. One process a run and machine sends at a time.
"""

import argparse
import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from chronicle.alerts.destinations import Destination, read_destinations
from chronicle.alerts.messages import Alert, alerts_of
from chronicle.alerts.outbox import SETTLE_SECONDS, Outbox, alerts_dir
from chronicle.alerts.sending import send
from chronicle.errors import ChronicleError
from chronicle.launch.beside import Beside, start_beside, wait_for_end
from chronicle.paths import RunPaths
from chronicle.settings import Settings, load_settings
from chronicle.story.read import read_story

INTERVAL_SECONDS = 2.0
LAST_PASS_SECONDS = 900  # a network that is down when the launch ends
WORDS = "chronicle alerts --send"


def destinations_of(settings: Settings) -> tuple[Destination, ...]:
    """The destinations that the settings name; raises `SettingsError`."""
    return read_destinations(settings.alerts, settings.origin.get("alerts", "chronicle.toml"))


def open_outboxes(paths: RunPaths, destinations: Sequence[Destination]) -> list[Outbox]:
    """An outbox for each destination; a new one begins now, and is told nothing of the past."""
    return [Outbox(alerts_dir(paths) / f"{one.name}.jsonl", one, send_one=send) for one in destinations]


class Courier:
    """Sends what is due to all destinations. `go` does one round and says each new trouble once."""

    def __init__(self, paths: RunPaths, outboxes: Sequence[Outbox], say: Callable[[str], None]) -> None:
        self.paths, self.outboxes, self._say = paths, outboxes, say
        self.alerts: list[Alert] = []
        self._seen: object = None
        self._look_again = 0.0
        self._told: set[tuple[str, str]] = set()

    def go(self, *, settle: float = SETTLE_SECONDS) -> int:
        """One round; returns how many messages were taken. A trouble of one destination keeps no other waiting."""
        self.look()
        count = 0
        for box in self.outboxes:
            try:
                count += box.deliver(self.alerts, settle=settle, most=20)
            except OSError as problem:
                self._tell(box, f"its outbox cannot be written ({problem.strerror or problem})")
                continue
            if box.why:
                self._tell(box, f"{box.why}; it is tried again")
            for why in set(box.refused.values()):
                self._tell(box, f"a message was refused for good: {why}")
        return count

    def left(self) -> int:
        """How many messages wait."""
        return sum(len(box.due(self.alerts)) for box in self.outboxes)

    def look(self) -> None:
        """Read the journal again where it has grown, and not while what it said is still being sent."""
        if time.monotonic() < self._look_again and self.left():
            return
        self._look_again = time.monotonic() + INTERVAL_SECONDS
        seen = [(path.name, path.stat().st_size) for path in sorted(self.paths.journal_dir.glob("*.jsonl"))]
        if seen != self._seen:
            self._seen = seen
            story = read_story(self.paths)
            self.alerts = alerts_of(story) if story.entries else []

    def _tell(self, box: Outbox, text: str) -> None:
        if (box.destination.name, text) not in self._told:
            self._told.add((box.destination.name, text))
            self._say(f"alerts to `{box.destination.name}`: {text}")


def start_alerts(settings: Settings, talk: Callable[[str], None]) -> Beside:
    """Start the process for this run, where `[alerts]` names a destination. Its outboxes begin before the launch does."""
    destinations = destinations_of(settings)
    if not destinations:
        return Beside()
    try:
        open_outboxes(settings.paths, destinations)
    except OSError as problem:
        talk(f"no alerts are sent: `{alerts_dir(settings.paths)}` cannot be written ({problem.strerror or problem})")
        return Beside()
    words = [sys.executable, "-m", "chronicle.alerts.process", "--run", settings.run, "--logs", str(settings.logs_dir)]
    return start_beside(
        words, os.environ, what="the process that sends alerts", later=f"send them with `{WORDS}`", talk=talk
    )


@contextmanager
def alone(paths: RunPaths) -> Iterator[bool]:
    """Whether this process may send for the run: on this machine another one may be at it."""
    alerts_dir(paths).mkdir(parents=True, exist_ok=True)
    with (alerts_dir(paths) / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass  # a file system without locks: the keys of the messages are the same
        yield True


def send_until_stdin_ends(arguments: list[str] | None = None) -> int:
    """Send until the launch has ended and nothing is left; wait for a process of an earlier launch that still sends."""
    parser = argparse.ArgumentParser(prog="chronicle.alerts.process")
    parser.add_argument("--run", required=True)
    parser.add_argument("--logs", type=Path, required=True)
    options = parser.parse_args(arguments)
    settings = load_settings(Path.cwd(), os.environ, run=options.run, logs=options.logs)
    over = threading.Event()
    threading.Thread(target=wait_for_end, args=(over, LAST_PASS_SECONDS), daemon=True).start()
    while True:
        with alone(settings.paths) as may:
            if may:
                return _send(settings, over)
        if over.wait(INTERVAL_SECONDS):
            return 0  # the process of an earlier launch reads the same journal and sends it all


def _send(settings: Settings, over: threading.Event) -> int:
    courier = Courier(settings.paths, open_outboxes(settings.paths, destinations_of(settings)), _say)
    ended_at = None
    while True:
        try:
            sent = courier.go()
        except (ChronicleError, OSError) as problem:
            _say(f"alerts: {problem}")
            sent = 0
        if over.is_set():
            ended_at = ended_at or time.monotonic()
            settled = time.monotonic() - ended_at > 2 * SETTLE_SECONDS
            if settled and not sent and not courier.left():
                return 0
        if not sent:
            time.sleep(INTERVAL_SECONDS) if over.is_set() else over.wait(INTERVAL_SECONDS)


def _say(line: str) -> None:
    print(f"chronicle: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(send_until_stdin_ends())
    except KeyboardInterrupt:
        sys.exit(130)
    except ChronicleError as problem:
        _say(f"alerts: {problem.message}")
        sys.exit(problem.exit_code)
