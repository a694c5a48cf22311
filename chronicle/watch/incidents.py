"""Events as journal entries: one when an event opens, one more whenever its tier, status or class changes."""

from __future__ import annotations

from collections.abc import Iterable

from chronicle.journal.writer import JournalWriter
from rollback.detect import Event, Status, Tier


class IncidentLog:
    """Writes `incident` entries; later entries of an event refer to its first."""

    def __init__(self, writer: JournalWriter, launch: int) -> None:
        self._writer, self._launch = writer, launch
        self._written: dict[int, tuple[str, tuple[str, str, str]]] = {}
        self._old: frozenset[int] = frozenset()

    def forget(self, events: Iterable[Event]) -> None:
        """These events belong to earlier launches, whose watchers have written them down."""
        self._old = frozenset(event.id for event in events)

    def is_old(self, event: Event) -> bool:
        return event.id in self._old

    def record(self, event: Event) -> bool:
        """Append an entry when there is something new to say; True when there was."""
        state = (event.kind.value, event.tier.value, event.status.value)
        known = self._written.get(event.id)
        if known is not None and known[1] == state:
            return False
        change = "opened" if known is None else "closed" if event.status is Status.RECOVERED else "changed"
        entry = self._writer.append(
            "incident", step=event.onset_step, launch=self._launch, title=self.title(event),
            refs=() if known is None else (known[0],), data={**event.to_json(), "change": change},
        )  # fmt: skip
        self._written[event.id] = (entry.id if known is None else known[0], state)
        return True

    @staticmethod
    def title(event: Event) -> str:
        """One line for journal and terminal."""
        where = ", ".join(event.channels) or "log"
        since = f"since step {event.onset_step}"
        if event.onset_low_step is not None and event.onset_low_step != event.onset_step:
            since += f" (at the earliest {event.onset_low_step})"
        state = f", {event.status.value}" if event.status is not Status.OPEN else ""
        detail = f": {event.evidence[0]}" if event.evidence else ""
        loud = "" if event.tier is Tier.NOTICE else f"{event.tier.value}: "
        return f"{loud}{event.kind.value} on {where} {since}{state}{detail}"
