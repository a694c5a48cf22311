"""The safety gate: the held-out loss over its best, smoothed, checked at every evaluation of a run.

A value that is not finite closes the gate at once: it is a finding, never a part of an average.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from bit_transformer.config import BelowOne, Positive, Size, require_fields
from bit_transformer.errors import GateTripped


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


class HeldOutGate:
    """The gate of a run. Its state is saved with the checkpoint, and it decides the same on every rank.

    `why` says why it is closed, and is empty while it is open. No finite value closes it in the first `burn_in` observations.
    """

    def __init__(self, config: GateConfig) -> None:
        self.config = config
        self.best, self.average = math.inf, 1.0
        self.num_observations = 0
        self.why = ""

    @property
    def state(self) -> GateState:
        """What the last observation left the gate in."""
        if self.why:
            return GateState.TRIPPED
        return GateState.OK if self.num_observations > self.config.burn_in else GateState.BURN_IN

    def observe(self, bpb: float) -> bool:
        """Add one evaluation in bits per byte; return whether the gate has opened or closed."""
        was_closed = bool(self.why)
        self.num_observations += 1
        self.why = self._find_fault(bpb)
        return was_closed != bool(self.why)

    def _find_fault(self, bpb: float) -> str:
        config, number = self.config, self.num_observations
        if not math.isfinite(bpb):
            return f"held-out bpb over its best is {bpb} at observation {number}, expected a finite number"
        self.best = min(self.best, bpb)
        self.average = config.decay * self.average + (1 - config.decay) * bpb / self.best
        if number <= config.burn_in or self.average < config.max_ratio:
            return ""
        return (f"smoothed held-out bpb over its best is {self.average:.4g} after {number} observations, expected below "
                f"{config.max_ratio:g}")

    def require_open(self) -> None:
        """Raise GateTripped in strict mode while the gate is closed, on every rank alike."""
        if self.why and self.config.mode == "strict":
            raise GateTripped(f"tripped: {self.why}",
                              "roll back with `chronicle rollback`, or set gate.mode=soft to go on")

    def to_json(self) -> dict[str, Any]:
        """Return plain values, so that a resume does not repeat the burn-in."""
        return {"best": self.best, "average": self.average, "num_observations": self.num_observations, "why": self.why}

    def load(self, data: Mapping[str, Any]) -> None:
        """Restore the output of `to_json`."""
        self.best, self.average = float(data["best"]), float(data["average"])
        self.num_observations = int(data["num_observations"])
        self.why = str(data["why"])
