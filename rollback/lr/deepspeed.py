"""DeepSpeed's own schedulers: a counter is saved, the LRs come from the config that the next launch is given.

Source: `deepspeed/runtime/lr_schedules.py` (0.19). A copy of the config lies in the model states; the loader ignores it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rollback.lr.configured import table
from rollback.lr.oracle import LrTable, Unknown

Lrs: TypeAlias = Callable[[int], list[float]]
Params: TypeAlias = Mapping[str, Any]

# type of scheduler -> (section of the config, field) of every LR it computes from: scaling them scales every LR it gives
LR_FIELDS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "WarmupLR": (("scheduler", "warmup_max_lr"), ("scheduler", "warmup_min_lr")),
    "WarmupDecayLR": (("scheduler", "warmup_max_lr"), ("scheduler", "warmup_min_lr")),
    "WarmupCosineLR": (("optimizer", "lr"),),
    "OneCycle": (("scheduler", "cycle_min_lr"), ("scheduler", "cycle_max_lr")),
    "LRRangeTest": (("scheduler", "lr_range_test_min_lr"),),
}
# what a field is when the config does not name it; None: whatever the optimizer was created with
DEFAULTS: Mapping[tuple[str, str], float | None] = {
    ("WarmupLR", "warmup_max_lr"): None,
    ("WarmupDecayLR", "warmup_max_lr"): 1e-3,
    ("WarmupLR", "warmup_min_lr"): 0.0,
    ("WarmupDecayLR", "warmup_min_lr"): 0.0,
    ("LRRangeTest", "lr_range_test_min_lr"): 1e-3,
}


def deepspeed_lrs(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], config: Mapping[str, Any], k: int
) -> LrTable | Unknown:
    """The next `k` LRs of DeepSpeed's own scheduler in `config`."""
    step, kind = state.get("last_batch_iteration"), scheduler_type(config)
    if kind is None or not isinstance(step, int):
        return Unknown("the recorded DeepSpeed config names no scheduler")
    if kind not in _RULES:
        return Unknown(f"DeepSpeed's {kind} is not one that can be computed")
    values = []
    for section, name in LR_FIELDS[kind]:
        value = params_of(config, section).get(name, DEFAULTS.get((kind, name)))
        if value is None and (created_with := params_of(config, "optimizer").get("lr")) is not None:
            value = created_with
        if not _is_lr(value):
            return Unknown(f"DeepSpeed's {kind} computes from the LR that the training script gives its optimizer")
        values.append(_per_group(value, len(groups)))
    try:
        lrs = _RULES[kind](params_of(config, "scheduler"), *values)
    except (TypeError, ValueError, ZeroDivisionError, KeyError) as problem:
        return Unknown(f"DeepSpeed's {kind} has parameters that cannot be computed with ({problem})")
    return table(lrs, step, groups, k, f"DeepSpeed's {kind}")


def scheduler_type(config: Mapping[str, Any]) -> str | None:
    """The type of scheduler that a DeepSpeed config names."""
    section = config.get("scheduler")
    return str(section["type"]) if isinstance(section, Mapping) and section.get("type") else None


def params_of(config: Mapping[str, Any], section: str) -> Params:
    """`scheduler.params` or `optimizer.params`, empty where there is none."""
    found = config.get(section)
    params = found.get("params") if isinstance(found, Mapping) else None
    return params if isinstance(params, Mapping) else {}


def _is_lr(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_lr, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _per_group(value: Any, num_groups: int) -> list[float]:
    return [float(v) for v in value] if isinstance(value, list | tuple) else [float(value)] * num_groups


def _rise(params: Params) -> tuple[int, Callable[[int], float]]:
    """(steps of the warm-up, its height from 0 to 1)."""
    steps = max(2, int(params.get("warmup_num_steps", 1000)))
    if params.get("warmup_type", "log") == "linear":
        return steps, lambda n: n / steps
    return steps, lambda n: 1.0 / math.log(steps) * math.log(n + 1)


def _between(low: list[float], high: list[float], height: float) -> list[float]:
    return [floor + (peak - floor) * height for floor, peak in zip(low, high, strict=True)]


def _warmup(params: Params, high: list[float], low: list[float]) -> Lrs:
    steps, rise = _rise(params)
    return lambda n: low if n < 0 else _between(low, high, rise(n) if n < steps else 1.0)


def _warmup_decay(params: Params, high: list[float], low: list[float]) -> Lrs:
    steps, rise = _rise(params)
    total = int(params["total_num_steps"])

    def lrs(n: int) -> list[float]:
        if n < 0:
            return low
        fall = max(0.0, float(total - n) / float(max(1.0, total - steps)))
        return _between(low, high, rise(n) if n < steps else fall)

    return lrs


def _warmup_cosine(params: Params, created_with: list[float]) -> Lrs:
    steps, rise = _rise(params)
    total, start, end = int(params["total_num_steps"]), params.get("warmup_min_ratio", 0.0), params.get("cos_min_ratio", 1e-4)

    def ratio(n: int) -> float:
        if n < 0:
            return 0.0
        if n < steps:
            return float(start + rise(n) * (1.0 - start))
        progress = min(1.0, (n - steps + 1) / max(1, total - steps))
        return float(max(0.0, end + (1.0 - end) * ((1 + math.cos(math.pi * progress)) / 2)))

    return lambda n: [lr * ratio(n) for lr in created_with]


def _range_test(params: Params, low: list[float]) -> Lrs:
    size, rate = params.get("lr_range_test_step_size", 2000), params.get("lr_range_test_step_rate", 1.0)
    stairs = bool(params.get("lr_range_test_staircase", False))

    def lrs(n: int) -> list[float]:
        interval = math.floor((n + 1) / size) if stairs else (n + 1) / size
        return [lr * (1 + rate * interval) for lr in low]

    return lrs


def _one_cycle(params: Params, low: list[float], high: list[float]) -> Lrs:
    first = float(params.get("cycle_first_step_size", 2000))
    second = first if params.get("cycle_second_step_size") is None else float(params["cycle_second_step_size"])
    total, ratio = first + second, first / (first + second)
    stairs = int(params.get("cycle_first_stair_count", 0))
    stairs_down = stairs if params.get("cycle_second_stair_count") is None else int(params["cycle_second_stair_count"])
    decay_size, decay_rate = params.get("decay_step_size", 0), params.get("decay_lr_rate", 0.0)

    def height(n: int) -> float:
        x = 1.0 + n / total - math.floor(1 + n / total)
        rising = x <= ratio
        count = stairs if rising else stairs_down
        if count > 0:
            inside = n % total
            position = inside * count / first if inside <= first else (total - inside) * count / second
            return math.floor(position) / count
        return x / ratio if rising else (x - 1) / (ratio - 1)

    def lrs(n: int) -> list[float]:
        if n < 0:
            return low
        if n < total:
            return _between(low, high, height(n + 1))
        if math.isclose(decay_size, 0) or math.isclose(decay_rate, 0):
            return low
        return [lr / (1 + decay_rate * ((n - total + 1) / decay_size)) for lr in low]

    return lrs


_RULES: Mapping[str, Callable[..., Lrs]] = {
    "WarmupLR": _warmup,
    "WarmupDecayLR": _warmup_decay,
    "WarmupCosineLR": _warmup_cosine,
    "OneCycle": _one_cycle,
    "LRRangeTest": _range_test,
}
