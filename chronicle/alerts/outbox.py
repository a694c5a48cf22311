"""What each destination has had, on disk: `logs/<run>/alerts/<name>.jsonl`, one line appended before and after each try.

The journal is the queue: what is due is computed from it, so nothing is lost where the process that sends is killed. A line
`trying` without an answer means that nobody knows whether the receiver has the message: it is sent again with the same key.
What happened before a destination was first used (`since`) is never sent. The order of a destination is the order of moments;
a receiver that does not answer delays its own messages only.
"""

import json
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from chronicle.alerts.destinations import Destination
from chronicle.alerts.messages import Alert
from chronicle.alerts.sending import Answer, send
from chronicle.paths import RunPaths

SETTLE_SECONDS = 3.0  # an incident's proposal is written moments after it
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0


def alerts_dir(paths: RunPaths) -> Path:
    """Where the outboxes of a run lie."""
    return paths.run_dir / "alerts"


class Outbox:
    """The messages of one destination. `deliver` sends what is due, in order, until one fails; a later call goes on."""

    def __init__(
        self,
        path: Path,
        destination: Destination,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        send_one: Callable[[Destination, Alert], Answer] = send,
    ) -> None:
        self.path, self.destination = path, destination
        self._now, self._send = now, send_one
        self.since = (begin := now()).replace(microsecond=begin.microsecond // 1000 * 1000)  # as exact as the journal is
        self.sent: set[str] = set()
        self.refused: dict[str, str] = {}
        self.why = ""  # why the last try failed
        self._pause, self._again = 0.0, datetime.min.replace(tzinfo=UTC)
        self._load()

    def due(self, alerts: Sequence[Alert]) -> list[Alert]:
        """What is to be sent now or later, oldest first: what this destination wants and has not had."""
        found: list[Alert] = []
        told = set(self.sent)  # incidents of which it was or will be told: nobody hears of the end of anything else
        for alert in alerts:
            if alert.moment < self.since or not self.destination.wants(alert):
                continue
            if alert.phase == "opened":
                told.add(alert.id)
            elif f"{alert.key}-opened" not in told:
                continue
            if alert.id not in self.sent and alert.id not in self.refused:
                found.append(alert)
        return found

    def deliver(self, alerts: Sequence[Alert], *, settle: float = SETTLE_SECONDS, most: int = 1000) -> int:
        """Send what is due, up to `most` messages; returns how many were sent. Raises OSError where the disk takes no line."""
        count = 0
        now = self._now()
        if now < self._again:
            return 0
        for alert in self.due(alerts)[:most]:
            if self.destination.is_quiet(alert, now.astimezone()) or now - alert.moment < timedelta(seconds=settle):
                continue
            if alert.phase == "ended" and f"{alert.key}-opened" not in self.sent:
                continue
            self._write(alert, "trying")
            answer = self._send(self.destination, alert)
            if answer.state == "failed":
                self._write(alert, "failed", answer.why)
                self.why = answer.why
                self._pause = min(LONGEST_PAUSE, max(FIRST_PAUSE, 2 * self._pause, answer.after))
                self._again = self._now() + timedelta(seconds=self._pause)
                return count
            self._pause, self.why = 0.0, ""
            if answer.state == "refused":
                self.refused[alert.id] = answer.why
            else:
                self.sent.add(alert.id)
                count += 1
            self._write(alert, answer.state, answer.why)
        return count

    def _load(self) -> None:
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            self._append({"since": self.since.isoformat()})
            return
        for line in lines:
            try:
                record = json.loads(line)
                if "since" in record:
                    self.since = datetime.fromisoformat(record["since"])
                    continue
                state, one = record["state"], record["id"]
            except (KeyError, TypeError, ValueError):
                continue  # half a line of a writer that was killed
            if state == "sent":
                self.sent.add(one)
            elif state == "refused":
                self.refused[one] = str(record.get("why", ""))

    def _write(self, alert: Alert, state: str, why: str = "") -> None:
        record = {"t": self._now().isoformat(), "id": alert.id, "state": state, **({"why": why} if why else {})}
        self._append(record)

    def _append(self, record: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
            if os.write(fd, line) != len(line):
                raise OSError(f"short write to `{self.path}` (disk full?)")
            os.fsync(fd)
        finally:
            os.close(fd)
