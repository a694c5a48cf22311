"""Learning-rate schedules as pure functions of the optimizer step.

Start, resume, rollback and growth all use `plan_schedule`, so a schedule that is rebuilt at step s continues unchanged. No
clock, no torch, no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bit_transformer.config import Amount, Count, Positive, Size, require_fields
from bit_transformer.errors import BadRecipe


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


def cosine_ramp(step: int, *, start: float, end: float, total_steps: int) -> float:
    """Return start + (end − start) · ½(1 − cos(π · min(1, step / total)))."""
    progress = min(1.0, step / total_steps) if total_steps else 1.0
    return start + (end - start) * 0.5 * (1 - math.cos(math.pi * progress))


def _constant(config: ScheduleConfig, step: int) -> float:
    return 1.0


def _wsd(config: ScheduleConfig, step: int) -> float:
    begin = config.total_steps - config.decay_steps
    if not config.decay_steps or step < begin:
        return 1.0
    progress = min(1.0, (step - begin) / config.decay_steps)
    return 1.0 - (1.0 - config.final_fraction) * progress


def _cosine(config: ScheduleConfig, step: int) -> float:
    after = max(0, step - config.warmup_steps)
    return cosine_ramp(after, start=1.0, end=config.final_fraction, total_steps=config.total_steps - config.warmup_steps)


def _onecycle(config: ScheduleConfig, step: int) -> float:
    """Cosine from 1/25 up to 1 over the first 30 %, then cosine down to `final_fraction` at the last update."""
    peak = max(1, round(0.3 * config.total_steps) - 1)
    if step <= peak:
        return cosine_ramp(step, start=1 / 25, end=1.0, total_steps=peak)
    return cosine_ramp(step - peak, start=1.0, end=config.final_fraction, total_steps=config.total_steps - 1 - peak)


# `plateau` is constant here: its decays depend on held-out losses and are part of the saved progress
SHAPES: dict[str, Callable[[ScheduleConfig, int], float]] = {
    "constant": _constant, "wsd": _wsd, "cosine": _cosine, "onecycle": _onecycle, "plateau": _constant}
