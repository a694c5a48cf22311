"""A proposal as values: what could be gone back to, what was done before, what may be spent, what is advised. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Action(StrEnum):
    """The rungs, in order; HARDWARE and FIX_LR are branches beside SKIP."""

    WAIT = "wait"
    SKIP = "skip-data"
    HARDWARE = "replace-hardware"
    FIX_LR = "fix-lr"
    LR_75 = "lr-x0.75"
    LR_50 = "lr-x0.5"
    STABILISE = "stabilise"
    STOP = "stop"

    @property
    def rung(self) -> int:
        return {
            "wait": 0,
            "skip-data": 1,
            "replace-hardware": 1,
            "fix-lr": 1,
            "lr-x0.75": 2,
            "lr-x0.5": 3,
            "stabilise": 4,
        }.get(self.value, 5)


LADDER = (Action.WAIT, Action.SKIP, Action.LR_75, Action.LR_50, Action.STABILISE, Action.STOP)
LR_SCALES = {Action.LR_75: 0.75, Action.LR_50: 0.5, Action.STABILISE: 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateCheckpoint:
    """A checkpoint that exists. `verified` None: nobody has looked yet, `chronicle rollback` will.

    `honours`: what the run said with it that it carries out (`plan_honours`); None: no save of it is on record.
    """

    step: int
    launch: int | None = None
    verified: bool | None = None
    healthy: bool = True
    honours: frozenset[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRollback:
    """One rollback already done: the onset it answered, where it went and how."""

    onset_step: int
    target_step: int
    action: Action = Action.SKIP
    lr_scale: float = 1.0
    day: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What may be spent before a person must speak; counted over `History.rollbacks`."""

    per_region: int = 3
    per_day: int = 4
    discarded_fraction: float = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What is known besides the events. `lr_factor` is the cumulative factor against the original schedule."""

    run: str | None = None
    last_step: int = 0
    seconds_per_step: float | None = None
    rollbacks: tuple[PastRollback, ...] = ()
    hardware: tuple[tuple[int, str], ...] = ()
    lr_factor: float = 1.0
    lr_raised: float = 1.0
    lr_expected: float | None = None
    options: tuple[str, ...] = ()  # what the command needs besides to find this run: `--logs DIR`, …
    honours: frozenset[str] = frozenset()  # what the trainer said that it carries out (`plan_honours`)
    checkpoint_interval: int | None = None
    discarded_steps: int = 0
    day: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another checkpoint one could go back to, with what it costs."""

    step: int
    launch: int | None
    cost_steps: int
    cost_hours: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Where to go, with what, why. `target_step` None: nothing verified lies before the onset; `command` is then None.

    `before_step` is the newest step that a target may have: what to look for where no checkpoint is known.
    """

    events: tuple[int, ...]
    cluster: int
    onset_step: int
    onset_low_step: int
    before_step: int
    target_step: int | None
    target_launch: int | None
    action: Action
    lr_scale: float
    cost_steps: int | None
    cost_hours: float | None
    alternatives: tuple[Alternative, ...]
    reasons: tuple[str, ...]
    exhausted: tuple[str, ...]
    command: str | None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        record = asdict(self)
        record["action"] = self.action.value
        for name in ("events", "alternatives", "reasons", "exhausted"):
            record[name] = list(record[name])
        return record
