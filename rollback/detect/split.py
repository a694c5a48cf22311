"""The same fold in two halves that may run in two processes: losses and judgement here, norms and the like there.

`EvidenceDetector` folds only the channels that never decide and hands out what they found, point by point;
`DecisiveDetector` folds the rest and takes those findings in where the whole detector would have made them. Together
they say, to the last byte, what one `Detector` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollback.channels import Role, role_of
from rollback.detect.channel import Channel
from rollback.detect.config import ChannelConfig
from rollback.detect.engine import DECISIVE, EVIDENCE, Detector
from rollback.detect.events import Event
from rollback.detect.excursion import ChannelEvent

Finding = tuple[int, str, dict[str, Any]]  # row, channel, the channel event as it was then
FINISHED = -1  # the row of what is found when the log ends


class EvidenceDetector(Detector):
    """Folds norms and the like only; `take` hands over what was found since the last call."""

    def __init__(self, config: ChannelConfig | None = None) -> None:
        super().__init__(config)
        self._found: list[Finding] = []

    def _meet(self, name: str) -> Role:
        role = role_of(name)
        self._roles[name] = role if role in EVIDENCE else Role.IGNORED
        if role in EVIDENCE:
            self._evidence[name] = Channel(name, self._config_for(role))
        return self._roles[name]

    def _fuse(
        self, role: Role, items: list[ChannelEvent], row: int, step: int, launch: int | None, changed: list[Event]
    ) -> None:
        self._found.extend((row, item.channel, item.to_json()) for item in items)

    def take(self) -> list[Finding]:
        found, self._found = self._found, []
        return found

    def finish(self) -> list[Event]:
        """What is found at the end belongs to no row."""
        before = self.take()
        super().finish()
        self._found = before + [(FINISHED, channel, item) for _, channel, item in self._found]
        return []


class DecisiveDetector(Detector):
    """Folds losses and everything that judges; the other half's findings are handed in before the point they belong to."""

    def __init__(self, config: ChannelConfig | None = None) -> None:
        super().__init__(config)
        self._waiting: list[Finding] = []
        self._known: dict[tuple[str, int], ChannelEvent] = {}

    def expect(self, findings: Sequence[Finding]) -> None:
        """Findings of rows that have not been folded yet, in order."""
        self._waiting.extend(findings)

    def _meet(self, name: str) -> Role:
        role = super()._meet(name)
        if role in EVIDENCE:
            del self._evidence[name]
        assert role in DECISIVE or name not in self._channels
        return role

    def _feed_evidence(
        self, row: int, step: int, launch: int | None, values: Mapping[str, float | None], repeated: bool,
        changed: list[Event],
    ) -> None:  # fmt: skip
        while self._waiting and self._waiting[0][0] == row:
            self._take_in(self._waiting.pop(0), row, step, launch, changed)

    def finish(self) -> list[Event]:
        changed = super().finish()
        stream = self._stream
        step = stream.last_step if stream.last_step is not None else 0
        for finding in self._waiting:
            self._take_in(finding, self.row - 1, step, stream.last_launch, changed)
        self._waiting = []
        return changed

    def _take_in(self, finding: Finding, row: int, step: int, launch: int | None, changed: list[Event]) -> None:
        _, channel, record = finding
        item = ChannelEvent.from_json(record)
        known = self._known.setdefault((channel, item.id), item)
        if known is not item:
            for name in ChannelEvent.__slots__:
                setattr(known, name, getattr(item, name))
        self._fuse(self._roles[channel], [known], row, step, launch, changed)
