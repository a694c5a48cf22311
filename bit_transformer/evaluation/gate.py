"""The safety gate: smoothed values against limits, blind until burned in. Pure state, saved with the checkpoint.

Training: the smoothed held-out loss against a limit. Inference: smoothed C and S against floors calibrated on data.
`strict` raises at a trip, `soft` asks the caller to try again (`verdict.retry`), both say what tripped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from bit_transformer.errors import BadRecipe, GateTripped


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """`strict` ends the launch at a trip, `soft` says so and goes on; `max_ratio` bounds held-out bpb over its best.

    Samples are judged one draw at a time against the floors taken from the data: `soft` draws again, up to `redraws`
    times, `strict` raises.
    """

    mode: str = "soft"
    decay: float = 0.9
    burn_in: int = 10
    max_ratio: float = 1.3
    redraws: int = 2

    def __post_init__(self) -> None:
        if self.mode not in ("soft", "strict"):
            raise BadRecipe(f"gate mode is `{self.mode}`, expected soft or strict")
        if not 0 <= self.decay < 1 or self.burn_in < 0 or self.max_ratio <= 1 or self.redraws < 0:
            raise BadRecipe(f"gate is {self}, expected decay from 0 to below 1, burn_in and redraws 0 or more, "
                            "max_ratio above 1")


class GateState(StrEnum):
    """WARN: within a tenth of a limit. TRIPPED: at or beyond it."""

    BURN_IN = "burn-in"
    OK = "ok"
    WARN = "warn"
    TRIPPED = "tripped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A smoothed value must stay above `floor` and below `ceiling`."""

    floor: float | None = None
    ceiling: float | None = None

    def state(self, value: float) -> GateState:
        """Return where the value stands."""
        above = None if self.floor is None else value - self.floor
        below = None if self.ceiling is None else self.ceiling - value
        if any(room is not None and room <= 0 for room in (above, below)):
            return GateState.TRIPPED
        near = (above is not None and above <= abs(self.floor or 0) / 10,
                below is not None and below <= abs(self.ceiling or 0) / 10)
        return GateState.WARN if any(near) else GateState.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the gate says after an observation; `tripped` names the values at fault."""

    state: GateState
    smoothed: Mapping[str, float]
    tripped: tuple[str, ...] = ()
    retry: bool = False


@dataclass(slots=True, kw_only=True)
class Gate:
    """Exponential averages of named values with `decay`; no verdict while observations ≤ `burn_in`."""

    limits: Mapping[str, Limit]
    decay: float = 0.9
    burn_in: int = 10
    strict: bool = True
    num_observations: int = 0
    averages: dict[str, float] = field(default_factory=dict)

    def observe(self, values: Mapping[str, float]) -> Verdict:
        """Take one observation of every limited value. Raises GateTripped in strict mode."""
        self.num_observations += 1
        for name in self.limits:
            before = self.averages.get(name, values[name])
            self.averages[name] = self.decay * before + (1 - self.decay) * values[name]
        if self.num_observations <= self.burn_in:
            return Verdict(state=GateState.BURN_IN, smoothed=dict(self.averages))
        states = {name: limit.state(self.averages[name]) for name, limit in self.limits.items()}
        tripped = tuple(name for name, state in states.items() if state is GateState.TRIPPED)
        if tripped and self.strict:
            raise GateTripped("; ".join(self._sentence(name) for name in tripped))
        worst = GateState.TRIPPED if tripped else GateState.WARN if GateState.WARN in states.values() else GateState.OK
        return Verdict(state=worst, smoothed=dict(self.averages), tripped=tripped, retry=bool(tripped))

    def _sentence(self, name: str) -> str:
        limit = self.limits[name]
        return (f"smoothed {name} is {self.averages[name]:.4g} after {self.num_observations} observations, "
                f"expected above {limit.floor} and below {limit.ceiling}")

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, so that a resume does not burn in again."""
        return {"num_observations": self.num_observations, "averages": dict(self.averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved averages."""
        self.num_observations, self.averages = int(state["num_observations"]), dict(state["averages"])
