"""Which scheduler class a saved state belongs to, and the LR each class computes at its counter.

torch never stores the class of a scheduler: `state_dict()` is the object's `__dict__` without the optimizer. Each class
has attributes that no other has, so the keys name it; a state with further keys belongs to a subclass that computes in
its own way, and the answer is `None`. LRs kept as float32 (0-dim tensors, numpy scalars) are rounded after
each operation, as torch rounds them. Pure: state and groups are changed in place, as torch changes its objects.

Source: `torch/optim/lr_scheduler.py` (1.13 to 2.13), `deepspeed/runtime/lr_schedules.py`, `timm/scheduler/` (1.0.31),
`mmengine/optim/scheduler/` (0.10.7), `megatron/core/optimizer_param_scheduler.py` (0.16.1) and
`speechbrain/nnet/schedulers.py` (1.0: its other schedulers keep counters alone, and compute from the script's numbers).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeAlias

from rollback.files.pickle_values import Encoding, StoredFloat


class SchedulerClass(StrEnum):
    """The scheduler classes that are recognised; values are torch's own class names."""

    LAMBDA = "LambdaLR"  # MultiplicativeLR saves the same keys; the two cannot be told apart
    STEP = "StepLR"
    MULTI_STEP = "MultiStepLR"
    CONSTANT = "ConstantLR"
    LINEAR = "LinearLR"
    EXPONENTIAL = "ExponentialLR"
    POLYNOMIAL = "PolynomialLR"
    COSINE = "CosineAnnealingLR"
    WARM_RESTARTS = "CosineAnnealingWarmRestarts"
    ONE_CYCLE = "OneCycleLR"
    CYCLIC = "CyclicLR"
    PLATEAU = "ReduceLROnPlateau"
    SEQUENTIAL = "SequentialLR"
    CHAINED = "ChainedScheduler"
    TIMM = "timm scheduler"  # of any class: all compute from `base_values`
    MMENGINE = "mmengine scheduler"  # of any class, for the LR
    MMENGINE_OTHER = "mmengine scheduler of another parameter"  # momentum, for example
    MEGATRON = "Megatron-core OptimizerParamScheduler"
    NEW_BOB = "SpeechBrain NewBobScheduler"
    DEEPSPEED = "DeepSpeed"  # WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle: the LRs are in the config


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_COMMON = _names("base_lrs last_epoch _step_count _last_lr _is_initial _get_lr_called_within_step verbose")

# class -> (required keys, optional keys); tried from top to bottom, the most specific first
_SIGNATURES: tuple[tuple[SchedulerClass, frozenset[str], frozenset[str]], ...] = (
    (
        SchedulerClass.TIMM,
        _names("base_values param_group_field t_in_epochs noise_range_t"),
        _names("""
            _initial_param_group_field metric noise_pct noise_type noise_std noise_seed t_initial lr_min cycle_mul cycle_decay
            cycle_limit warmup_t warmup_lr_init warmup_prefix k_decay warmup_steps decay_t decay_rate decay_milestones power
            lb ub
        """),
    ),
    (
        SchedulerClass.MMENGINE,
        _names("base_values param_name begin end by_epoch _last_value"),
        _names("""
            last_step _global_step step_size gamma milestones factor total_iters T_max eta_min eta_min_ratio start_factor
            end_factor power eta_max div_factor final_div_factor total_steps anneal_func _schedule_phases periods
            restart_weights cumulative_periods
        """),
    ),
    (SchedulerClass.SEQUENTIAL, _names("_schedulers _milestones"), frozenset()),
    (SchedulerClass.CHAINED, _names("_schedulers"), frozenset()),
    (
        SchedulerClass.PLATEAU,
        _names("num_bad_epochs patience factor min_lrs"),
        _names("default_min_lr cooldown eps mode threshold best cooldown_counter mode_worse threshold_mode"),
    ),
    (
        SchedulerClass.ONE_CYCLE,
        _names("total_steps _schedule_phases"),
        _names("cycle_momentum use_beta1 _anneal_func_type anneal_func"),
    ),
    (
        SchedulerClass.CYCLIC,
        _names("max_lrs total_size step_ratio"),
        _names("""
            mode gamma scale_mode cycle_momentum use_beta1 base_momentums max_momentums _scale_fn_custom _scale_fn_ref
        """),
    ),
    (SchedulerClass.WARM_RESTARTS, _names("T_0 T_i T_mult T_cur eta_min"), frozenset()),
    (SchedulerClass.COSINE, _names("T_max eta_min"), frozenset()),
    (SchedulerClass.MULTI_STEP, _names("milestones gamma"), frozenset()),
    (SchedulerClass.STEP, _names("step_size gamma"), frozenset()),
    (SchedulerClass.LINEAR, _names("start_factor end_factor total_iters"), frozenset()),
    (SchedulerClass.CONSTANT, _names("factor total_iters"), frozenset()),
    (SchedulerClass.POLYNOMIAL, _names("total_iters power"), frozenset()),
    (SchedulerClass.EXPONENTIAL, _names("gamma"), frozenset()),
    (SchedulerClass.LAMBDA, _names("lr_lambdas"), frozenset()),
    (SchedulerClass.DEEPSPEED, _names("last_batch_iteration"), frozenset()),
    (SchedulerClass.NEW_BOB, _names("hyperparam_value metric_values current_patient"), frozenset()),
    (
        SchedulerClass.MEGATRON,
        _names("min_lr lr_decay_style lr_decay_steps num_steps"),
        _names("max_lr start_lr lr_warmup_steps start_wd end_wd wd_incr_style wd_incr_steps"),
    ),
)

# Schedulers of other libraries; not of torch's shape
FOREIGN = frozenset(
    {SchedulerClass.TIMM, SchedulerClass.MMENGINE, SchedulerClass.MMENGINE_OTHER, SchedulerClass.MEGATRON,
     SchedulerClass.NEW_BOB}
)

# Classes whose next LR follows from counter and base LRs, so that setting the counter sets the LR.
CLOSED_FORM = frozenset({SchedulerClass.LAMBDA, SchedulerClass.ONE_CYCLE, SchedulerClass.CYCLIC})


def infer_scheduler_class(state: Mapping[str, Any]) -> SchedulerClass | None:
    """Name the class whose attributes `state` carries, or `None` when no known class fits exactly."""
    if not isinstance(state, Mapping):  # a damaged or unknown list of children
        return None
    for name, required, optional in _SIGNATURES:
        if required <= state.keys():
            further = state.keys() - required - optional - _COMMON
            name = SchedulerClass.MMENGINE_OTHER if name is SchedulerClass.MMENGINE and state["param_name"] != "lr" else name
            return name if all(_is_private_flag(key, state[key]) for key in further) else None
    return None


def child_states(state: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The states nested in a SequentialLR or ChainedScheduler, in order; empty for every other class."""
    children = state.get("_schedulers")
    return tuple(child for child in children if isinstance(child, Mapping)) if isinstance(children, list | tuple) else ()


def _is_private_flag(key: str, value: Any) -> bool:
    """Whether a field may be one that another version of torch keeps: private, and without any value."""
    return key.startswith("_") and value is None


# --- LRs stored as float32 (0-dim tensors, numpy scalars): rounded after each operation, as torch does

_SINGLE = struct.Struct("<f")


def _rounded(value: float) -> float:
    try:
        return float(_SINGLE.unpack(_SINGLE.pack(value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


class Single(float):
    """A float32: sums, differences, products and quotients with it are rounded to float32."""

    __slots__ = ()

    def __new__(cls, value: float) -> Single:
        return float.__new__(cls, _rounded(value))

    def __add__(self, other: float) -> Single:
        return Single(float(self) + _rounded(other))

    __radd__ = __add__

    def __sub__(self, other: float) -> Single:
        return Single(float(self) - _rounded(other))

    def __rsub__(self, other: float) -> Single:
        return Single(_rounded(other) - float(self))

    def __mul__(self, other: float) -> Single:
        return Single(float(self) * _rounded(other))

    __rmul__ = __mul__

    def __truediv__(self, other: float) -> Single:
        return Single(float(self) / _rounded(other))


def as_kept(value: Any, *, rounded: bool = True) -> Any:
    """A copy of a state or of groups; with `rounded` numbers stored as float32 become `Single`, else plain floats."""
    if isinstance(value, Mapping):
        return {key: as_kept(part, rounded=rounded) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_kept(part, rounded=rounded) for part in value]
    if rounded and is_single(value):
        return Single(value)
    return float(value) if isinstance(value, StoredFloat) else value


def is_single(value: Any) -> bool:
    """Whether a number is stored as a float32 by torch or numpy."""
    if isinstance(value, StoredFloat):
        place = value.place
        return place is not None and place.encoding in (Encoding.RAW, Encoding.LATIN1) and place.dtype == "float32"
    return isinstance(value, Single)


# --- The LR of each class at its counter, in torch's order of operations

State: TypeAlias = dict[str, Any]
Groups: TypeAlias = list[dict[str, Any]]


class CannotCompute(Exception):
    """The LR depends on something that the checkpoint does not hold."""


def write_lrs(state: State, groups: Groups, values: Sequence[float]) -> None:
    """Write the LRs into the groups, in place."""
    for group, value in zip(groups, values, strict=True):
        group["lr"] = Single(value) if isinstance(group.get("lr"), Single) else value


def rule_of(name: SchedulerClass | None) -> Callable[[State, Groups], list[float]]:
    """The function that computes the LRs of a class; raises `CannotCompute` for a class without one."""
    if name in _RULES:
        return _RULES[name]
    if name is SchedulerClass.LAMBDA:
        raise CannotCompute("the function of a LambdaLR or MultiplicativeLR is not saved in a checkpoint")
    if name is SchedulerClass.DEEPSPEED:
        raise CannotCompute("DeepSpeed's own schedulers keep their LRs in the DeepSpeed config")
    if name in FOREIGN:
        raise CannotCompute(f"the LRs of a {name} are not computed here")
    raise CannotCompute("the class of a nested scheduler is unknown")


def _multiply(groups: Groups, factor: float) -> list[float]:
    return [group["lr"] * factor for group in groups]


def keep_lrs(groups: Groups) -> list[float]:
    """The LRs of the groups as they are."""
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
    """Advance `T_cur` and `T_i` of a CosineAnnealingWarmRestarts by one step."""
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
