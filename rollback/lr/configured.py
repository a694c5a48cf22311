"""LRs that follow from a recorded configuration: transformers' schedules and DeepSpeed's own schedulers.

transformers saves no function, but `training_args.bin` names it, and `trainer_state.json` its horizon; DeepSpeed keeps
its schedulers' arguments in the config, of which a copy lies in the model states. Both are true only as long as the
next launch is given the same arguments, and every answer is labelled so. Formulas: `transformers/optimization.py` (4.57
to 5.23), `deepspeed/runtime/lr_schedules.py` (0.19). An answer that does not reproduce the saved LR is not given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollback.lr.oracle import LrTable, Unknown

_TOLERANCE = 1e-9
_DEEPSPEED_LOG = "log"


def transformers_lrs(
    state: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    max_steps: float | None,
    k: int,
) -> LrTable | Unknown:
    """The next `k` LRs of a Trainer's schedule; `max_steps` is the horizon in `trainer_state.json`."""
    kind, horizon = str(config.get("lr_scheduler_type", "")), int(max_steps or config.get("max_steps") or 0)
    if config.get("lr_scheduler_kwargs"):
        return Unknown(f"schedule `{kind}` has arguments of its own (lr_scheduler_kwargs)")
    factor = _transformers_factor(kind, _warmup_steps(config, horizon), horizon)
    if factor is None:
        return Unknown(f"schedule `{kind}` of transformers is not one that can be computed")
    bases, step = state.get("base_lrs"), state.get("last_epoch")
    if not isinstance(bases, list | tuple) or not isinstance(step, int) or len(bases) != len(groups):
        return Unknown("the scheduler state does not say its base LRs and counter")
    return _table(lambda n: [float(base) * factor(n) for base in bases], step, groups, k, f"schedule `{kind}`")


def deepspeed_lrs(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], config: Mapping[str, Any], k: int
) -> LrTable | Unknown:
    """The next `k` LRs of WarmupLR, WarmupDecayLR or WarmupCosineLR, from the recorded config."""
    scheduler = config.get("scheduler")
    step = state.get("last_batch_iteration")
    if not isinstance(scheduler, Mapping) or not isinstance(step, int):
        return Unknown("the recorded DeepSpeed config names no scheduler")
    kind, params = str(scheduler.get("type")), dict(scheduler.get("params") or {})
    num_groups = len(groups)
    warmup = max(2, int(params.get("warmup_num_steps", 1000)))
    total = int(params.get("total_num_steps", 0))
    rise = _rise(params, warmup)
    if kind == "WarmupCosineLR":
        return Unknown("WarmupCosineLR scales the LR that the optimizer is created with, which is not recorded")
    if kind not in ("WarmupLR", "WarmupDecayLR"):
        return Unknown(f"DeepSpeed's {kind} is not one that can be computed")
    high = _per_group(params.get("warmup_max_lr", 0.001), num_groups)
    low = _per_group(params.get("warmup_min_lr", 0.0), num_groups)

    def lrs(n: int) -> list[float]:
        gamma = rise(n) if n < warmup else 1.0
        if kind == "WarmupDecayLR" and n >= warmup:
            gamma = max(0.0, float(total - n) / float(max(1.0, total - warmup)))
        return [floor + (peak - floor) * gamma for floor, peak in zip(low, high, strict=True)]

    return _table(lrs, step, groups, k, f"DeepSpeed's {kind}")


def _table(
    lrs: Callable[[int], list[float]], step: int, groups: Sequence[Mapping[str, Any]], k: int, who: str
) -> LrTable | Unknown:
    held = [group.get("lr") for group in groups]
    given = lrs(step)
    if not all(
        isinstance(lr, int | float) and math.isclose(x, lr, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * 1e-6)
        for x, lr in zip(given, held, strict=True)
    ):
        return Unknown(f"{who} as recorded would be at {given}, the checkpoint holds {held}: other arguments")
    return (
        tuple(float(lr) for lr in held if isinstance(lr, int | float)),
        *(tuple(lrs(step + i)) for i in range(1, k)),
    )


def _warmup_steps(config: Mapping[str, Any], horizon: int) -> int:
    steps = config.get("warmup_steps") or 0
    if 0 < steps < 1:  # 5.x: a fraction in the same argument
        return math.ceil(horizon * steps)
    return int(steps) or math.ceil(horizon * float(config.get("warmup_ratio") or 0))


def _transformers_factor(kind: str, warmup: int, horizon: int) -> Callable[[int], float] | None:
    def progress(n: int) -> float:
        return (n - warmup) / max(1, horizon - warmup)

    after: dict[str, Callable[[int], float]] = {
        "constant": lambda n: 1.0,
        "constant_with_warmup": lambda n: 1.0,
        "linear": lambda n: max(0.0, (horizon - n) / max(1, horizon - warmup)),
        "cosine": lambda n: max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress(n)))),
        "cosine_with_restarts": lambda n: (
            0.0 if progress(n) >= 1.0 else max(0.0, 0.5 * (1.0 + math.cos(math.pi * (progress(n) % 1.0))))
        ),
        "inverse_sqrt": lambda n: 1.0 / math.sqrt((n + (warmup or 10_000) - warmup) / (warmup or 10_000)),
    }
    rule = after.get(kind)
    if rule is None or (horizon <= 0 and kind in ("linear", "cosine", "cosine_with_restarts")):
        return None
    if kind == "constant":
        return rule
    return lambda n: n / max(1, warmup) if n < warmup else rule(n)


def _rise(params: Mapping[str, Any], warmup: int) -> Callable[[int], float]:
    if params.get("warmup_type", _DEEPSPEED_LOG) == "linear":
        return lambda n: n / warmup
    return lambda n: 1.0 / math.log(warmup) * math.log(n + 1)


def _per_group(value: Any, num_groups: int) -> list[float]:
    return [float(v) for v in value] if isinstance(value, list | tuple) else [float(value)] * num_groups
