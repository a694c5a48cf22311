"""Learning-rate schedules as pure functions of the optimizer step.

Start, resume, rollback and growth all use `plan_schedule`, so a schedule that is rebuilt at step s continues unchanged. No
clock, no torch, no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from bit_transformer.config import Amount, Count, Positive, Size, require_fields
from bit_transformer.errors import BadRecipe
from chronicle.resume.learning_rate import warmed


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Warm-up and shape of a schedule; for demonstrations and studies, a step from which the LR is raised on purpose."""

    shape: Literal["constant", "wsd", "cosine", "onecycle", "plateau"] = "wsd"
    warmup_steps: Size = 0
    total_steps: Count = 1
    decay_steps: Size = 0
    final_fraction: Amount = 0.1
    raise_step: Size | None = None
    raise_factor: Positive = 1.0
    plateau_patience: Count = 3
    plateau_ratio: Positive = 0.5
    plateau_min_gain: Amount = 0.005

    def __post_init__(self) -> None:
        require_fields(self)
        if self.warmup_steps + self.decay_steps > self.total_steps:
            raise BadRecipe(f"{self.warmup_steps} warm-up and {self.decay_steps} decay steps do not fit into "
                            f"{self.total_steps} steps")


def plan_schedule(config: ScheduleConfig) -> Callable[[int], float]:
    """Return the factor on the base LR as a function of completed optimizer steps."""
    shape = SHAPES[config.shape]

    def factor(step: int) -> float:
        value = shape(config, step)
        if step < config.warmup_steps:
            value *= (step + 1) / config.warmup_steps
        if config.raise_step is not None and step >= config.raise_step:
            value *= config.raise_factor
        return value

    return factor


def with_rewarms(factor: Callable[[int], float],
                 rewarms: Callable[[], Sequence[tuple[int, int]]]) -> Callable[[int], float]:
    """Return `factor` with a linear warm-up over each (first step, number of steps) that `rewarms()` lists."""

    return lambda step: float(warmed(factor(step), step, rewarms()))


def with_plateaus(factor: Callable[[int], float], decays: Callable[[], Sequence[int]],
                  ratio: float) -> Callable[[int], float]:
    """Return `factor`, multiplied by `ratio` for every step of `decays()` that is reached."""

    def decayed(step: int) -> float:
        return factor(step) * ratio ** sum(first <= step for first in decays())

    return decayed


def _constant(config: ScheduleConfig, step: int) -> float:
    return 1.0


def _wsd(config: ScheduleConfig, step: int) -> float:
    begin = config.total_steps - config.decay_steps
    if not config.decay_steps or step < begin:
        return 1.0
    progress = min(1.0, (step - begin) / config.decay_steps)
    return 1.0 - (1.0 - config.final_fraction) * progress


def _cosine(config: ScheduleConfig, step: int) -> float:
    span = max(1, config.total_steps - config.warmup_steps)
    progress = min(1.0, max(0.0, (step - config.warmup_steps) / span))
    return config.final_fraction + (1.0 - config.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))


def _onecycle(config: ScheduleConfig, step: int) -> float:
    """Cosine from 1/25 up to 1 over the first 30 %, then cosine down to `final_fraction` at the last update."""
    last, peak = config.total_steps - 1, max(1, round(0.3 * config.total_steps) - 1)
    if step <= peak:
        return 1 / 25 + (1 - 1 / 25) * 0.5 * (1 - math.cos(math.pi * step / peak))
    progress = min(1.0, (step - peak) / max(1, last - peak))
    return config.final_fraction + (1 - config.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))


# `plateau` is constant here: its decays depend on held-out losses and are part of the saved progress
SHAPES: dict[str, Callable[[ScheduleConfig, int], float]] = {
    "constant": _constant, "wsd": _wsd, "cosine": _cosine, "onecycle": _onecycle, "plateau": _constant}
