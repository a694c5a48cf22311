"""Which scheduler class a saved state belongs to, told by its keys alone.

torch never stores the class of a scheduler: `state_dict()` is the object's `__dict__` without the optimizer. Each class
has attributes that no other has, so the keys name it. A state with further float-valued keys belongs to some subclass
that computes in its own way, and is answered with `None`: nothing is guessed.

Source: the attributes set by the constructors in `torch/optim/lr_scheduler.py` (1.13 to 2.13) and
`deepspeed/runtime/lr_schedules.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class SchedulerClass(StrEnum):
    """The families whose LR arithmetic is known here; values are torch's own class names."""

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
    DEEPSPEED = "DeepSpeed"  # WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle: the LRs live in the config


_COMMON = frozenset(
    {"base_lrs", "last_epoch", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step", "verbose"}
)

# class -> (keys that must be there, keys that may be there); tried from top to bottom, the most telling first
_SIGNATURES: tuple[tuple[SchedulerClass, frozenset[str], frozenset[str]], ...] = (
    (SchedulerClass.SEQUENTIAL, frozenset({"_schedulers", "_milestones"}), frozenset()),
    (SchedulerClass.CHAINED, frozenset({"_schedulers"}), frozenset()),
    (
        SchedulerClass.PLATEAU,
        frozenset({"num_bad_epochs", "patience", "factor", "min_lrs"}),
        frozenset({"default_min_lr", "cooldown", "eps", "mode", "threshold", "best", "cooldown_counter", "mode_worse"})
        | frozenset({"threshold_mode"}),
    ),
    (
        SchedulerClass.ONE_CYCLE,
        frozenset({"total_steps", "_schedule_phases"}),
        frozenset({"cycle_momentum", "use_beta1", "_anneal_func_type", "anneal_func"}),
    ),
    (
        SchedulerClass.CYCLIC,
        frozenset({"max_lrs", "total_size", "step_ratio"}),
        frozenset({"mode", "gamma", "scale_mode", "cycle_momentum", "use_beta1", "base_momentums", "max_momentums"})
        | frozenset({"_scale_fn_custom", "_scale_fn_ref"}),
    ),
    (SchedulerClass.WARM_RESTARTS, frozenset({"T_0", "T_i", "T_mult", "T_cur", "eta_min"}), frozenset()),
    (SchedulerClass.COSINE, frozenset({"T_max", "eta_min"}), frozenset()),
    (SchedulerClass.MULTI_STEP, frozenset({"milestones", "gamma"}), frozenset()),
    (SchedulerClass.STEP, frozenset({"step_size", "gamma"}), frozenset()),
    (SchedulerClass.LINEAR, frozenset({"start_factor", "end_factor", "total_iters"}), frozenset()),
    (SchedulerClass.CONSTANT, frozenset({"factor", "total_iters"}), frozenset()),
    (SchedulerClass.POLYNOMIAL, frozenset({"total_iters", "power"}), frozenset()),
    (SchedulerClass.EXPONENTIAL, frozenset({"gamma"}), frozenset()),
    (SchedulerClass.LAMBDA, frozenset({"lr_lambdas"}), frozenset()),
    (SchedulerClass.DEEPSPEED, frozenset({"last_batch_iteration"}), frozenset()),
)

# Their next LR follows from the counter and the base LRs: moving the counter moves the LR with it.
CLOSED_FORM = frozenset({SchedulerClass.LAMBDA, SchedulerClass.ONE_CYCLE, SchedulerClass.CYCLIC})


def infer_scheduler_class(state: Mapping[str, Any]) -> SchedulerClass | None:
    """Name the class whose attributes `state` carries, or `None` when no known class fits exactly."""
    for name, required, optional in _SIGNATURES:
        if required <= state.keys():
            further = state.keys() - required - optional - _COMMON
            return None if any(_holds_float(state[key]) for key in further) else name
    return None


def child_states(state: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The states nested in a SequentialLR or ChainedScheduler, in order; empty for every other class."""
    children = state.get("_schedulers")
    return tuple(children) if isinstance(children, list | tuple) else ()


def _holds_float(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_float(item) for item in value)
    return isinstance(value, float)
