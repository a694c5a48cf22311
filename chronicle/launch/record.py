"""The journal as the supervisor writes it: a journal that cannot be written never ends a run.

The failure is said once, entries wait, and every later append tries them again in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from chronicle.errors import JournalError
from chronicle.journal import Entry, JournalWriter

__all__ = ["LaunchRecord"]


class LaunchRecord:
    """Entries of one launch. `append` returns None when the entry only waits."""

    def __init__(self, writer: JournalWriter, launch: int, *, complain: Callable[[str], None]) -> None:
        self.writer = writer
        self.launch = launch
        self._complain = complain
        self._waiting: list[tuple[str, dict[str, Any]]] = []
        self._said = False

    @property
    def waiting(self) -> int:
        """Entries that are not on disk yet."""
        return len(self._waiting)

    def append(
        self, kind: str, *, title: str = "", step: int | None = None, data: Mapping[str, Any] | None = None
    ) -> Entry | None:
        """Write the entry, or keep it until the journal takes it."""
        self._waiting.append((kind, {"title": title, "step": step, "data": dict(data or {})}))
        return self.flush()

    def flush(self) -> Entry | None:
        """Write what waits; returns the last entry written when nothing is left waiting."""
        entry: Entry | None = None
        while self._waiting:
            kind, fields = self._waiting[0]
            try:
                entry = self.writer.append(kind, launch=self.launch, **fields)
            except JournalError as error:
                if not self._said:
                    self._complain(f"{error}; the run goes on, entries wait in memory")
                    self._said = True
                return None
            self._waiting.pop(0)
        return entry
