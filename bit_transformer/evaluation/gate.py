"""The safety gate: the held-out loss over its best, smoothed, checked at every evaluation of a run.

A value that is not finite closes the gate at once: it is a finding, never a part of an average.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from bit_transformer.config import BelowOne, Positive, Size, require_fields
from bit_transformer.errors import GateTripped

_REMEDY = "roll back with `chronicle rollback`, or set gate.mode=soft to go on"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """`strict` ends the launch at a trip, `soft` reports it; `max_ratio` bounds held-out bpb relative to its best value."""

    mode: Literal["soft", "strict"] = "soft"
    decay: BelowOne = 0.9
    burn_in: Size = 10
    max_ratio: Positive = 1.3

    def __post_init__(self) -> None:
        require_fields(self)


class GateState(StrEnum):
    """TRIPPED: at or beyond the limit, or not finite."""

    BURN_IN = "burn-in"
    OK = "ok"
    TRIPPED = "tripped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A smoothed value must stay below `ceiling`."""

    ceiling: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict:
    """The gate's result after an observation, and why it closed; empty where it is open."""

    state: GateState
    why: str = ""


@dataclass(slots=True, kw_only=True)
class SmoothedGate:
    """Limits on exponential averages of named values; no finite value trips it during the first `burn_in` observations."""

    limits: Mapping[str, Limit]
    decay: float = 0.9
    burn_in: int = 10
    strict: bool = True
    num_observations: int = 0
    averages: dict[str, float] = field(default_factory=dict)

    def observe(self, values: Mapping[str, float]) -> GateVerdict:
        """Add one observation of every limited value. Raises GateTripped in strict mode."""
        self.num_observations += 1
        burns_in, found = self.num_observations <= self.burn_in, list[str]()
        for name, limit in self.limits.items():
            value = values[name]
            if not math.isfinite(value):
                found.append(f"{name} is {value} at observation {self.num_observations}, expected a finite number")
                continue
            before = self.averages.get(name, value)
            average = self.averages[name] = self.decay * before + (1 - self.decay) * value
            if average >= limit.ceiling and not burns_in:
                found.append(f"smoothed {name} is {average:.4g} after {self.num_observations} observations, expected below "
                             f"{limit.ceiling:g}")
        if found and self.strict:
            raise GateTripped("; ".join(found), _REMEDY)
        if found:
            return GateVerdict(state=GateState.TRIPPED, why="; ".join(found))
        return GateVerdict(state=GateState.BURN_IN if burns_in else GateState.OK)


_RATIO = "held-out bpb over its best"


class HeldOutGate:
    """The gate of a run. Its state is saved with the checkpoint, and it decides the same on every rank."""

    def __init__(self, config: GateConfig) -> None:
        self.best, self.verdict = math.inf, GateVerdict(state=GateState.BURN_IN)
        self._gate = SmoothedGate(limits={_RATIO: Limit(ceiling=config.max_ratio)}, decay=config.decay, burn_in=config.burn_in,
                                  strict=False)
        self._is_strict = config.mode == "strict"

    def observe(self, bpb: float) -> bool:
        """Add one evaluation in bits per byte; return whether the gate has opened or closed."""
        self.best = min(self.best, bpb) if math.isfinite(bpb) else self.best
        was_closed = self.verdict.state is GateState.TRIPPED
        self.verdict = self._gate.observe({_RATIO: bpb / self.best})
        return was_closed != (self.verdict.state is GateState.TRIPPED)

    def require_open(self) -> None:
        """Raise GateTripped in strict mode while the gate is closed, on every rank alike."""
        if self.verdict.why and self._is_strict:
            raise GateTripped(f"tripped: {self.verdict.why}", _REMEDY)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, so that a resume does not repeat the burn-in."""
        gate, verdict = self._gate, self.verdict
        return {"best": self.best, "state": str(verdict.state), "why": verdict.why, "averages": dict(gate.averages),
                "num_observations": gate.num_observations}

    def load(self, data: Mapping[str, Any]) -> None:
        """Restore the output of `to_json`."""
        self.best, self.verdict = float(data["best"]), GateVerdict(state=GateState(data["state"]), why=data["why"])
        self._gate.averages, self._gate.num_observations = dict(data["averages"]), int(data["num_observations"])
