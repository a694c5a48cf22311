"""LR schedules of transformers: `training_args.bin` names the schedule, `trainer_state.json` gives its length.

Source: `transformers/optimization.py` (4.57 to 5.23), each formula in its order of operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rollback.lr.oracle import LrTable, Unknown, table_from

Factor: TypeAlias = Callable[[int], float]
Maker: TypeAlias = Callable[
    ..., Factor
]  # (warm-up steps, horizon, LR the optimizer was created with, **its own arguments)


def transformers_lrs(
    state: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    max_steps: float | None,
    k: int,
) -> LrTable | Unknown:
    """The next `k` LRs of a Trainer's schedule; `max_steps` is the horizon in `trainer_state.json`."""
    kind, horizon = str(config.get("lr_scheduler_type", "")), int(max_steps or config.get("max_steps") or 0)
    maker = _MAKERS.get(kind)
    if maker is None:
        return Unknown(f"schedule `{kind}` of transformers is not one that can be computed")
    if horizon <= 0 and kind not in _ENDLESS:
        return Unknown(f"schedule `{kind}` of transformers has a horizon, and neither file says it")
    bases, step = state.get("base_lrs"), state.get("last_epoch")
    if not isinstance(bases, list | tuple) or not isinstance(step, int) or len(bases) != len(groups):
        return Unknown("the scheduler state does not say its base LRs and counter")
    own = config.get("lr_scheduler_kwargs") or {}
    created_with = config.get("learning_rate", bases[0] if bases else 0.0)
    try:
        factor = maker(_warmup_steps(config, horizon), horizon, created_with, **(own if kind != "constant" else {}))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as problem:
        return Unknown(f"schedule `{kind}` is not known with lr_scheduler_kwargs {dict(own)} ({problem})")
    return table_from(lambda n: [float(base) * factor(n) for base in bases], step, groups, k, f"schedule `{kind}`")


def _warmup_steps(config: Mapping[str, Any], horizon: int) -> int:
    steps = config.get("warmup_steps") or 0
    if 0 < steps < 1:  # 5.x: a fraction in the same argument
        return math.ceil(horizon * steps)
    return int(steps) or math.ceil(horizon * float(config.get("warmup_ratio") or 0))


def _warmed(warmup: int, after: Factor) -> Factor:
    return lambda n: n / max(1, warmup) if n < warmup else after(n)


def _wave(warmup: int, horizon: int, num_cycles: float, floor: float) -> Factor:
    def after(n: int) -> float:
        progress = (n - warmup) / max(1, horizon - warmup)
        factor = 0.5 * (1.0 + math.cos(math.pi * float(num_cycles) * 2.0 * progress))
        return max(0.0, factor * (1 - floor) + floor)

    return after


def _constant(warmup: int, horizon: int, lr: float) -> Factor:
    return lambda n: 1.0


def _constant_with_warmup(warmup: int, horizon: int, lr: float, **_ignored: Any) -> Factor:
    return _warmed(warmup, lambda n: 1.0)


def _linear(warmup: int, horizon: int, lr: float) -> Factor:
    return _warmed(warmup, lambda n: max(0.0, (horizon - n) / max(1, horizon - warmup)))


def _cosine(warmup: int, horizon: int, lr: float, num_cycles: float = 0.5) -> Factor:
    return _warmed(warmup, _wave(warmup, horizon, num_cycles, 0.0))


def _cosine_with_restarts(warmup: int, horizon: int, lr: float, num_cycles: int = 1) -> Factor:
    def after(n: int) -> float:
        progress = (n - warmup) / max(1, horizon - warmup)
        if progress >= 1.0:
            return 0.0
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((float(num_cycles) * progress) % 1.0))))

    return _warmed(warmup, after)


def _polynomial(warmup: int, horizon: int, lr: float, lr_end: float = 1e-7, power: float = 1.0) -> Factor:
    def after(n: int) -> float:
        if n > horizon:
            return lr_end / lr
        remaining = 1 - (n - warmup) / (horizon - warmup)
        return float(((lr - lr_end) * remaining**power + lr_end) / lr)

    return _warmed(warmup, after)


def _inverse_sqrt(warmup: int, horizon: int, lr: float, timescale: int | None = None) -> Factor:
    scale = timescale or warmup or 10_000
    return _warmed(warmup, lambda n: 1.0 / math.sqrt((n + scale - warmup) / scale))


def _floor(lr: float, min_lr: float | None, min_lr_rate: float | None) -> float:
    if (min_lr is None) == (min_lr_rate is None):
        raise ValueError("one of min_lr and min_lr_rate is expected")
    return min_lr_rate if min_lr_rate is not None else float(min_lr or 0.0) / lr


def _floored_wave(
    warmup: int,
    horizon: int,
    lr: float,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> Factor:
    return _wave(warmup, horizon, num_cycles, _floor(lr, min_lr, min_lr_rate))


def _cosine_with_min_lr(warmup: int, horizon: int, lr: float, **own: Any) -> Factor:
    return _warmed(warmup, _floored_wave(warmup, horizon, lr, **own))


def _cosine_warmup_with_min_lr(
    warmup: int, horizon: int, lr: float, warmup_lr_rate: float | None = None, **own: Any
) -> Factor:
    after = _floored_wave(warmup, horizon, lr, **own)

    def factor(n: int) -> float:
        if n >= warmup:
            return after(n + 1)
        if warmup_lr_rate is None:
            return (n + 1.0) / max(1.0, warmup)
        return warmup_lr_rate + (1.0 - warmup_lr_rate) * n / max(1, warmup - 1)

    return factor


def _warmup_stable_decay(
    warmup: int,
    horizon: int,
    lr: float,
    num_decay_steps: int = 0,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> Factor:
    stable = horizon - warmup - num_decay_steps if num_stable_steps is None else num_stable_steps
    rise, fall = _SHAPES[warmup_type], _SHAPES[decay_type]

    def factor(n: int) -> float:
        if n < warmup:
            height = rise(1.0 - n / max(1, warmup), 0.5)
        elif n < warmup + stable:
            return 1.0
        elif n < warmup + stable + num_decay_steps:
            height = fall((n - warmup - stable) / max(1, num_decay_steps), num_cycles)
        else:
            return min_lr_ratio
        return max(0.0, height * (1.0 - min_lr_ratio) + min_lr_ratio)

    return factor


# from 1 down to 0 as progress goes from 0 to 1; a warm-up is the same shape backwards
_SHAPES: Mapping[str, Callable[[float, float], float]] = {
    "linear": lambda progress, cycles: 1.0 - progress,
    "cosine": lambda progress, cycles: 0.5 * (1.0 + math.cos(math.pi * float(cycles) * 2.0 * progress)),
    "1-sqrt": lambda progress, cycles: 1.0 - math.sqrt(progress),
}
_MAKERS: Mapping[str, Maker] = {
    "constant": _constant,
    "constant_with_warmup": _constant_with_warmup,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
    "inverse_sqrt": _inverse_sqrt,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "cosine_warmup_with_min_lr": _cosine_warmup_with_min_lr,
    "warmup_stable_decay": _warmup_stable_decay,
}
_ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")
