"""What every number of a recipe must lie between: checked when the recipe is made, before anything is opened or built."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from bit_transformer.errors import BadRecipe

_ONE_OR_MORE = (
    "checkpoint_every", "eval_every", "eval_windows", "log_every", "accumulation_steps", "data.window_bytes", "data.batch_size",
    "model.d_model", "model.num_heads", "model.num_layers", "model.d_ff", "model.max_bits", "schedule.plateau_patience")
_ZERO_OR_MORE = (
    "telemetry_windows", "qat_from_step", "ponder_weight", "min_bytes_per_parameter", "data.num_workers",
    "data.compress_ramp_steps", "optimizer.weight_decay", "model.chunk", "model.overlap", "schedule.warmup_steps",
    "schedule.decay_steps", "schedule.final_fraction", "schedule.raise_step", "schedule.plateau_min_gain")
_ABOVE_ZERO = ("optimizer.lr", "optimizer.max_grad_norm", "schedule.raise_factor", "schedule.plateau_ratio")
_BELOW_ONE = ("ema_decay", "optimizer.beta1", "optimizer.beta2")
_SHARES = ("data.compress_end",)
_BOUNDS: tuple[tuple[tuple[str, ...], str, Callable[[float], bool]], ...] = (
    (_ONE_OR_MORE, "1 or more", lambda value: value >= 1),
    (_ZERO_OR_MORE, "0 or more", lambda value: value >= 0),
    (_ABOVE_ZERO, "a number above 0", lambda value: value > 0),
    (_BELOW_ONE, "from 0 to below 1", lambda value: 0 <= value < 1),
    (_SHARES, "from 0 to 1", lambda value: 0 <= value <= 1))


def require_bounds(recipe: Any) -> None:
    """Raise BadRecipe for the first number outside its bounds, naming the field and what is expected; None is no number."""
    for names, expected, holds in _BOUNDS:
        for name in names:
            value = attrgetter(name)(recipe)
            if value is not None and not (math.isfinite(value) and holds(value)):
                raise BadRecipe(f"{name} is {value}, expected {expected}")
    for source, weight in recipe.data.sources.items():
        if type(weight) is not int or weight < 1:
            raise BadRecipe(f"source `{source}` has weight {weight!r}, expected a whole number above 0")
    if not recipe.data.sources:
        raise BadRecipe("data.sources is empty, expected one source or more, such as {'code': 7, 'reference': 3}")
