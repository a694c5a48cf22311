"""The LR of each scheduler class at its counter: torch's arithmetic in torch's order of operations. Pure.

Source: `torch/optim/lr_scheduler.py` (2.13). State and groups are changed in place, as torch changes its objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rollback.lr.infer import SchedulerClass, infer_scheduler_class
from rollback.lr.single import Single

State: TypeAlias = dict[str, Any]
Groups: TypeAlias = list[dict[str, Any]]


class CannotCompute(Exception):
    """This step needs something that the checkpoint does not hold."""


def write_lrs(state: State, groups: Groups, values: Sequence[float]) -> None:
    for group, value in zip(groups, values, strict=True):
        group["lr"] = Single(value) if isinstance(group.get("lr"), Single) else value


def rule_of(name: SchedulerClass | None) -> Callable[[State, Groups], list[float]]:
    if name in _RULES:
        return _RULES[name]
    if name is SchedulerClass.LAMBDA:
        raise CannotCompute("the function of a LambdaLR or MultiplicativeLR is not saved in a checkpoint")
    if name is SchedulerClass.DEEPSPEED:
        raise CannotCompute("DeepSpeed's own schedulers keep their LRs in the DeepSpeed config")
    raise CannotCompute("the class of a nested scheduler is not known")


def _multiply(groups: Groups, factor: float) -> list[float]:
    return [group["lr"] * factor for group in groups]


def keep_lrs(groups: Groups) -> list[float]:
    return [group["lr"] for group in groups]


def _step_lr(state: State, groups: Groups) -> list[float]:
    due = state["last_epoch"] != 0 and state["last_epoch"] % state["step_size"] == 0
    return _multiply(groups, state["gamma"]) if due else keep_lrs(groups)


def _multi_step_lr(state: State, groups: Groups) -> list[float]:
    times = state["milestones"].get(state["last_epoch"])
    return _multiply(groups, state["gamma"] ** times) if times else keep_lrs(groups)


def _constant_lr(state: State, groups: Groups) -> list[float]:
    if state["last_epoch"] == 0:
        return _multiply(groups, state["factor"])
    return _multiply(groups, 1.0 / state["factor"]) if state["last_epoch"] == state["total_iters"] else keep_lrs(groups)


def _linear_lr(state: State, groups: Groups) -> list[float]:
    start, rise, n = state["start_factor"], state["end_factor"] - state["start_factor"], state["last_epoch"]
    if n == 0:
        return _multiply(groups, start)
    if n > state["total_iters"]:
        return keep_lrs(groups)
    return _multiply(groups, 1.0 + rise / (state["total_iters"] * start + (n - 1) * rise))


def _exponential_lr(state: State, groups: Groups) -> list[float]:
    return _multiply(groups, state["gamma"])


def _polynomial_lr(state: State, groups: Groups) -> list[float]:
    n, total = state["last_epoch"], state["total_iters"]
    if n > total:
        return keep_lrs(groups)
    return _multiply(groups, ((1.0 - n / total) / (1.0 - (n - 1) / total)) ** state["power"])


def _cosine_lr(state: State, groups: Groups) -> list[float]:
    n, period, floor = state["last_epoch"], state["T_max"], state["eta_min"]
    if state["_step_count"] == 1 and n > 0:
        return _cosine_closed(state)
    if (n - 1 - period) % (2 * period) == 0:  # leaving the minimum, where the recursion would divide by zero
        rise = 1 - math.cos(math.pi / period)
        return [g["lr"] + (base - floor) * rise / 2 for base, g in zip(state["base_lrs"], groups, strict=True)]
    now, before = 1 + math.cos(math.pi * n / period), 1 + math.cos(math.pi * (n - 1) / period)
    return [now / before * (group["lr"] - floor) + floor for group in groups]


def _cosine_closed(state: Mapping[str, Any]) -> list[float]:
    floor, arc = state["eta_min"], 1 + math.cos(math.pi * state["last_epoch"] / state["T_max"])
    return [floor + (base - floor) * arc / 2 for base in state["base_lrs"]]


def move_warm_restart(state: State) -> None:
    if state["last_epoch"] <= 0:
        state["T_cur"] = state["last_epoch"] = 0
        return
    state["T_cur"] += 1
    if state["T_cur"] >= state["T_i"]:
        state["T_cur"] %= state["T_i"]
        state["T_i"] *= state["T_mult"]


def _warm_restarts_lr(state: State, groups: Groups) -> list[float]:
    floor, arc = state["eta_min"], 1 + math.cos(math.pi * state["T_cur"] / state["T_i"])
    return [floor + (base - floor) * arc / 2 for base in state["base_lrs"]]


def _cyclic_lr(state: State, groups: Groups) -> list[float]:
    n = state["last_epoch"]
    cycle = math.floor(1 + n / state["total_size"])
    x = 1.0 + n / state["total_size"] - cycle
    ratio = state["step_ratio"]
    height = x / ratio if x <= ratio else (x - 1) / (ratio - 1)
    factor = _cyclic_factor(state, cycle if state["scale_mode"] == "cycle" else n)
    limits = zip(state["base_lrs"], state["max_lrs"], strict=True)
    return [low + (high - low) * height * factor for low, high in limits]


def _cyclic_factor(state: State, x: float) -> float:
    if state.get("_scale_fn_custom") is not None or state["mode"] not in ("triangular", "triangular2", "exp_range"):
        raise CannotCompute("CyclicLR with a custom scale_fn: the function is not saved in a checkpoint")
    if state["mode"] == "triangular":
        return 1.0
    return float(1 / (2.0 ** (x - 1)) if state["mode"] == "triangular2" else state["gamma"] ** x)


def _one_cycle_lr(state: State, groups: Groups) -> list[float]:
    n, phases = state["last_epoch"], state["_schedule_phases"]
    if n > state["total_steps"]:
        raise CannotCompute(f"OneCycleLR ends after {state['total_steps']} steps; torch raises at the next one")
    start = 0.0
    for phase in phases:
        if n <= phase["end_step"] or phase is phases[-1]:
            break
        start = phase["end_step"]
    fraction = (n - start) / (phase["end_step"] - start)
    anneal = _anneal_linear if state.get("_anneal_func_type") == "linear" else _anneal_cosine
    return [anneal(group[phase["start_lr"]], group[phase["end_lr"]], fraction) for group in groups]


def _anneal_cosine(start: float, end: float, fraction: float) -> float:
    return end + (start - end) / 2.0 * (math.cos(math.pi * fraction) + 1)


def _anneal_linear(start: float, end: float, fraction: float) -> float:
    return (end - start) * fraction + start


_RULES: dict[SchedulerClass | None, Callable[[State, Groups], list[float]]] = {
    SchedulerClass.STEP: _step_lr,
    SchedulerClass.MULTI_STEP: _multi_step_lr,
    SchedulerClass.CONSTANT: _constant_lr,
    SchedulerClass.LINEAR: _linear_lr,
    SchedulerClass.EXPONENTIAL: _exponential_lr,
    SchedulerClass.POLYNOMIAL: _polynomial_lr,
    SchedulerClass.COSINE: _cosine_lr,
    SchedulerClass.WARM_RESTARTS: _warm_restarts_lr,
    SchedulerClass.CYCLIC: _cyclic_lr,
    SchedulerClass.ONE_CYCLE: _one_cycle_lr,
}


def closed_form(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[float]:
    """The LR at `last_epoch`, from the base LRs; torch's `_get_closed_form_lr`, or `get_lr` where there is none."""
    name, n = infer_scheduler_class(state), state["last_epoch"]
    if name is SchedulerClass.COSINE:
        return _cosine_closed(state)
    if name in (SchedulerClass.WARM_RESTARTS, SchedulerClass.CYCLIC, SchedulerClass.ONE_CYCLE):
        return rule_of(name)(dict(state), [dict(group) for group in groups])
    if name not in _FACTORS:
        rule_of(name)  # raises with the reason
        raise CannotCompute(f"{name} has no closed form")
    return [base * _FACTORS[name](state, n) for base in state["base_lrs"]]


def _multi_step_factor(state: Mapping[str, Any], n: int) -> float:
    passed = sum(times for milestone, times in state["milestones"].items() if milestone <= n)
    return float(state["gamma"] ** passed)


def _linear_factor(state: Mapping[str, Any], n: int) -> float:
    start, end, total = state["start_factor"], state["end_factor"], state["total_iters"]
    return float(start + (end - start) * min(total, n) / total)


def _polynomial_factor(state: Mapping[str, Any], n: int) -> float:
    total = state["total_iters"]
    return float((1.0 - min(total, n) / total) ** state["power"])


_FACTORS: dict[SchedulerClass | None, Callable[[Mapping[str, Any], int], float]] = {
    SchedulerClass.STEP: lambda s, n: float(s["gamma"] ** (n // s["step_size"])),
    SchedulerClass.MULTI_STEP: _multi_step_factor,
    SchedulerClass.CONSTANT: lambda s, n: float(s["factor"] + (n >= s["total_iters"]) * (1 - s["factor"])),
    SchedulerClass.LINEAR: _linear_factor,
    SchedulerClass.EXPONENTIAL: lambda s, n: float(s["gamma"] ** n),
    SchedulerClass.POLYNOMIAL: _polynomial_factor,
}
