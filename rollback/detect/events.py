"""The result types of the detector: kinds, tiers, statuses, and the event itself. They convert to and from JSON.

Rows count logged points from 0, because steps repeat after a rewind. Unknown is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Self

from rollback.records import record_of

LONE_ROWS = 2  # logged points


class Kind(StrEnum):
    """The kinds of incidents, by the names used in the labelled curves; the guard sees `POISONED` and `REPLICAS` in memory."""

    INSTANT_SPIKE = "instant-spike"
    GRADUAL_DIVERGENCE = "gradual-divergence"
    LEVEL_SHIFT = "level-shift"
    LEVEL_DROP = "level-drop"
    RESUME_BUMP = "resume-bump"
    RESUME_DROP = "resume-drop"
    RESTART_REWIND = "restart-rewind"
    REINIT = "reinit"
    NAN = "nan"
    LR_BUG = "lr-bug"
    LR_MISMATCH = "lr-mismatch"
    INTERLEAVED_WRITERS = "interleaved-writers"
    MIX_SHIFT = "mix-shift"
    DATA_ORDER = "data-order"
    TOO_GOOD = "too-good"
    PLATEAU = "plateau"
    POISONED = "weights-not-finite"
    REPLICAS = "replicas-differ"
    STANDS_STILL = "stands-still"
    LOSS_MISSING = "loss-missing"
    STEPS_SKIPPED = "steps-skipped"


class Tier(StrEnum):
    """How serious: notice (goes into the journal), warn (look at it), propose (act); ordered by `rank`."""

    NOTICE = "notice"
    WARN = "warn"
    PROPOSE = "propose"

    @property
    def rank(self) -> int:
        """The place in the order notice < warn < propose."""
        return ("notice", "warn", "propose").index(self.value)


class Status(StrEnum):
    """Whether the run recovered: an equivalence test decides, not a threshold."""

    OPEN = "open"
    RECOVERED = "recovered"
    PARTIAL = "partial"
    DIVERGING = "diverging"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a run, fused over its channels.

    `excess` is the peak above the frozen reference in the main channel's own unit, `sigmas` the same in noise units.
    `uncertainty_rows` is the width from the lower bound to the estimate. `evidence` holds short sentences.
    """

    id: int
    kind: Kind
    tier: Tier
    status: Status
    onset_step: int | None
    onset_low_step: int | None
    onset_row: int | None
    onset_low_row: int | None
    alarm_step: int
    alarm_row: int
    peak_step: int | None = None
    peak_row: int | None = None
    recovered_step: int | None = None
    recovered_row: int | None = None
    channels: tuple[str, ...] = ()
    cluster: int = 0
    launch: int | None = None
    excess: float | None = None
    sigmas: float | None = None
    interval: float = 1.0
    expected: float | None = None  # the LR that was promised where another one was logged
    evidence: tuple[str, ...] = ()

    @property
    def is_lone(self) -> bool:
        """Whether it was over after a point or two: one hard batch, which says nothing about the next."""
        end, onset = self.recovered_row, self.onset_row
        return end is not None and onset is not None and end - onset <= LONE_ROWS

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; enums as their names, tuples as lists."""
        return record_of(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Rebuild an event; a missing required key raises KeyError, unknown keys are left out."""
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in record.items() if name in known}
        values["kind"], values["tier"] = Kind(record["kind"]), Tier(record["tier"])
        values["status"] = Status(record["status"])
        for name in ("channels", "evidence"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)
