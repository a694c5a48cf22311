"""The next LRs of a saved scheduler, computed without torch from its state and the optimizer's groups.

Every rule repeats the arithmetic of `torch/optim/lr_scheduler.py` (2.13) in the same order of operations, so that the
result is bit-identical for Python floats. A scheduler whose function is not saved (LambdaLR, MultiplicativeLR,
CyclicLR with a custom `scale_fn`) is answered with `Unknown`, and so is a state whose saved LR is not what its own
class gives at its own counter: it was edited by hand, or the class is another one.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rollback.lr.infer import SchedulerClass, infer_scheduler_class

State: TypeAlias = dict[str, Any]
Groups: TypeAlias = list[dict[str, Any]]
LrTable: TypeAlias = tuple[tuple[float, ...], ...]

_REPLAY_LIMIT_STEPS = 200_000
_RELATIVE_TOLERANCE = 1e-6  # closed form against torch's recursion: rounding only
_ABSOLUTE_TOLERANCE = 1e-9  # of the base LR, where a curve touches zero


@dataclass(frozen=True, slots=True)
class Unknown:
    """The answer "cannot be computed", with the reason in words."""

    reason: str


class _CannotCompute(Exception):
    """Internal: this step needs something that the checkpoint does not hold."""


def next_lrs(
    state: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    k: int,
    *,
    scheduler_steps: int = 1,
    metrics: Sequence[float] | None = None,
) -> LrTable | Unknown:
    """LRs of the next `k` optimizer steps, one row a step, one column a parameter group.

    Row 0 is what the first step after loading uses, that is the groups' own `lr`. `scheduler_steps` is how often the
    trainer steps the scheduler per optimizer step (Accelerate's prepared schedulers: `num_processes`). `metrics` are
    the values a ReduceLROnPlateau will be given, one per scheduler step.
    """
    reproduced = reproduces_saved_lr(state, groups)
    if isinstance(reproduced, Unknown):
        return reproduced
    return simulate_lrs(state, groups, k, scheduler_steps=scheduler_steps, metrics=metrics)


def simulate_lrs(
    state: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    k: int,
    *,
    scheduler_steps: int = 1,
    metrics: Sequence[float] | None = None,
) -> LrTable | Unknown:
    """As `next_lrs`, without asking first whether the saved LR is the one the class would give."""
    live, live_groups = copy.deepcopy(dict(state)), [dict(group) for group in groups]
    values = iter(metrics if metrics is not None else ())
    rows: list[tuple[float, ...]] = []
    try:
        for row in range(k):
            rows.append(tuple(float(group["lr"]) for group in live_groups))
            if row + 1 < k:
                _advance_optimizer_step(live, live_groups, scheduler_steps, values)
    except _CannotCompute as problem:
        return Unknown(str(problem))
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as problem:
        return Unknown(f"the scheduler state is malformed ({type(problem).__name__}: {problem})")
    return tuple(rows)


def reproduces_saved_lr(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Unknown | None:
    """`None` when the inferred class, at the saved counter, gives the saved `_last_lr` and the groups hold it too."""
    name = infer_scheduler_class(state)
    if name is None:
        return Unknown(f"no known scheduler class has the keys {sorted(map(str, state))}")
    if name is SchedulerClass.DEEPSPEED:
        return Unknown("DeepSpeed's own schedulers keep their LRs in the DeepSpeed config, not in the checkpoint")
    saved, held = state.get("_last_lr"), [group.get("lr") for group in groups]
    if not _plain(saved) or not _plain(held):
        return Unknown("an LR is kept as a tensor or numpy scalar, not as a Python float")
    if list(saved) != held:  # type: ignore[arg-type]
        return Unknown(f"the scheduler's _last_lr {saved} and the optimizer's lr {held} disagree")
    try:
        given = _from_scratch(state, groups)
    except _CannotCompute as problem:
        return Unknown(str(problem))
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as problem:
        return Unknown(f"the scheduler state is malformed ({type(problem).__name__}: {problem})")
    if given is not None and not all(map(_close, given, held, _bases(state, groups))):
        return Unknown(f"{name} would be at {given} by its own fields, the checkpoint holds {held}: edited before?")
    return None


def _plain(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    )


def _close(given: float, held: float, base: float) -> bool:
    return math.isclose(given, held, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE * abs(base))


def _bases(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[float]:
    return [max(float(group.get("initial_lr") or 0.0), float(group["lr"])) for group in groups]


# --- one step of one class -------------------------------------------------------------------------------------------


def _advance_optimizer_step(state: State, groups: Groups, scheduler_steps: int, metrics: Iterator[float]) -> None:
    for _ in range(scheduler_steps):
        # Accelerate's wrapper stops a scheduler that has `total_steps` once it has been stepped that often
        if scheduler_steps > 1 and state.get("_step_count", 0) > state.get("total_steps", math.inf):
            continue
        _step(state, groups, metrics)


def _step(state: State, groups: Groups, metrics: Iterator[float]) -> None:
    """`scheduler.step()`: move the counter, write the new LRs into the groups and into `_last_lr`."""
    name = infer_scheduler_class(state)
    if name is SchedulerClass.SEQUENTIAL:
        _step_sequential(state, groups, metrics)
    elif name is SchedulerClass.CHAINED:
        for child in state["_schedulers"]:
            _step(child, groups, metrics)
    elif name is SchedulerClass.PLATEAU:
        _step_plateau(state, groups, metrics)
    else:
        state["_step_count"] = state.get("_step_count", 0) + 1
        state["last_epoch"] += 1
        if name is SchedulerClass.WARM_RESTARTS:
            _move_warm_restart(state)
        _write(state, groups, _rule(name)(state, groups))
    state["_last_lr"] = [group["lr"] for group in groups]


def _write(state: State, groups: Groups, values: Sequence[float]) -> None:
    for group, value in zip(groups, values, strict=True):
        group["lr"] = value


def _rule(name: SchedulerClass | None) -> Callable[[State, Groups], list[float]]:
    if name in _RULES:
        return _RULES[name]
    if name is SchedulerClass.LAMBDA:
        raise _CannotCompute("the function of a LambdaLR or MultiplicativeLR is not saved in a checkpoint")
    if name is SchedulerClass.DEEPSPEED:
        raise _CannotCompute("DeepSpeed's own schedulers keep their LRs in the DeepSpeed config")
    raise _CannotCompute("the class of a nested scheduler is not known")


def _multiply(groups: Groups, factor: float) -> list[float]:
    return [group["lr"] * factor for group in groups]


def _keep(groups: Groups) -> list[float]:
    return [group["lr"] for group in groups]


def _step_lr(state: State, groups: Groups) -> list[float]:
    due = state["last_epoch"] != 0 and state["last_epoch"] % state["step_size"] == 0
    return _multiply(groups, state["gamma"]) if due else _keep(groups)


def _multi_step_lr(state: State, groups: Groups) -> list[float]:
    times = state["milestones"].get(state["last_epoch"])
    return _multiply(groups, state["gamma"] ** times) if times else _keep(groups)


def _constant_lr(state: State, groups: Groups) -> list[float]:
    if state["last_epoch"] == 0:
        return _multiply(groups, state["factor"])
    return _multiply(groups, 1.0 / state["factor"]) if state["last_epoch"] == state["total_iters"] else _keep(groups)


def _linear_lr(state: State, groups: Groups) -> list[float]:
    start, rise, n = state["start_factor"], state["end_factor"] - state["start_factor"], state["last_epoch"]
    if n == 0:
        return _multiply(groups, start)
    if n > state["total_iters"]:
        return _keep(groups)
    return _multiply(groups, 1.0 + rise / (state["total_iters"] * start + (n - 1) * rise))


def _exponential_lr(state: State, groups: Groups) -> list[float]:
    return _multiply(groups, state["gamma"])


def _polynomial_lr(state: State, groups: Groups) -> list[float]:
    n, total = state["last_epoch"], state["total_iters"]
    if n > total:
        return _keep(groups)
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


def _move_warm_restart(state: State) -> None:
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
        raise _CannotCompute("CyclicLR with a custom scale_fn: the function is not saved in a checkpoint")
    if state["mode"] == "triangular":
        return 1.0
    return float(1 / (2.0 ** (x - 1)) if state["mode"] == "triangular2" else state["gamma"] ** x)


def _one_cycle_lr(state: State, groups: Groups) -> list[float]:
    n, phases = state["last_epoch"], state["_schedule_phases"]
    if n > state["total_steps"]:
        raise _CannotCompute(f"OneCycleLR ends after {state['total_steps']} steps; torch raises at the next one")
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


def _step_sequential(state: State, groups: Groups, metrics: Iterator[float]) -> None:
    state["last_epoch"] += 1
    index = bisect_right(state["_milestones"], state["last_epoch"])
    child = state["_schedulers"][index]
    if index > 0 and state["_milestones"][index - 1] == state["last_epoch"]:
        child["last_epoch"] = 0  # torch starts the next scheduler by its closed form at zero
        _write(child, groups, _closed_form(child, groups))
        child["_last_lr"] = [group["lr"] for group in groups]
    else:
        _step(child, groups, metrics)


def _step_plateau(state: State, groups: Groups, metrics: Iterator[float]) -> None:
    value = next(metrics, None)
    if value is None:
        raise _CannotCompute("ReduceLROnPlateau follows a metric that is not known yet")
    state["last_epoch"] += 1
    if _better(state, value):
        state["best"], state["num_bad_epochs"] = value, 0
    else:
        state["num_bad_epochs"] += 1
    if state["cooldown_counter"] > 0:
        state["cooldown_counter"] -= 1
        state["num_bad_epochs"] = 0
    if state["num_bad_epochs"] > state["patience"]:
        _reduce(state, groups)
        state["cooldown_counter"], state["num_bad_epochs"] = state["cooldown"], 0


def _better(state: State, value: float) -> bool:
    best, threshold = state["best"], state["threshold"]
    if state["mode"] == "min":
        return bool(value < (best * (1.0 - threshold) if state["threshold_mode"] == "rel" else best - threshold))
    return bool(value > (best * (threshold + 1.0) if state["threshold_mode"] == "rel" else best + threshold))


def _reduce(state: State, groups: Groups) -> None:
    for group, floor in zip(groups, state["min_lrs"], strict=True):
        reduced = max(group["lr"] * state["factor"], floor)
        if group["lr"] - reduced > state["eps"]:
            group["lr"] = reduced


# --- the LR at the saved counter, from the class's own fields ----------------------------------------------------------


def _closed_form(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[float]:
    """The LR at `last_epoch`, from the base LRs; torch's `_get_closed_form_lr`, or `get_lr` where there is none."""
    name, n = infer_scheduler_class(state), state["last_epoch"]
    if name is SchedulerClass.COSINE:
        return _cosine_closed(state)
    if name in (SchedulerClass.WARM_RESTARTS, SchedulerClass.CYCLIC, SchedulerClass.ONE_CYCLE):
        return _rule(name)(dict(state), [dict(group) for group in groups])
    if name not in _FACTORS:
        _rule(name)  # raises with the reason
        raise _CannotCompute(f"{name} has no closed form")
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


def _from_scratch(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[float] | None:
    """What the class gives at the saved counter; `None` where only the past metrics could tell (Plateau)."""
    name = infer_scheduler_class(state)
    if name is SchedulerClass.PLATEAU:
        return None
    if name is SchedulerClass.CHAINED:
        return _replay_chain(state["_schedulers"], groups)
    if name is SchedulerClass.SEQUENTIAL:
        active = state["_schedulers"][bisect_right(state["_milestones"], state["last_epoch"])]
        return _from_scratch(active, groups)
    return _closed_form(state, groups)


def _replay_chain(children: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> list[float]:
    """Run a chain from its first step: a product of recursions has no closed form once one has an `eta_min`."""
    live = [copy.deepcopy(dict(child)) for child in children]
    steps = max(child["last_epoch"] for child in live)
    if steps > _REPLAY_LIMIT_STEPS:
        raise _CannotCompute(f"a ChainedScheduler of {steps} steps is too long to replay")
    live_groups = [dict(group) for group in groups]
    _write({}, live_groups, live[0]["base_lrs"])
    for child in live:
        if infer_scheduler_class(child) in (SchedulerClass.SEQUENTIAL, SchedulerClass.CHAINED):
            raise _CannotCompute("a scheduler nested twice in a ChainedScheduler cannot be replayed")
        child.update(last_epoch=0, _step_count=1)
        if infer_scheduler_class(child) is SchedulerClass.WARM_RESTARTS:
            child.update(T_cur=0, T_i=child["T_0"])
        _write(child, live_groups, _initial(child, live_groups))
    for _ in range(steps):
        for child in live:
            _step(child, live_groups, iter(()))
    return _keep(live_groups)


def _initial(child: State, groups: Groups) -> list[float]:
    """The step a constructor takes: only the classes that act at `last_epoch == 0` change the LR there."""
    name = infer_scheduler_class(child)
    acting = (SchedulerClass.CONSTANT, SchedulerClass.LINEAR, SchedulerClass.WARM_RESTARTS, SchedulerClass.CYCLIC)
    if name in acting or name is SchedulerClass.ONE_CYCLE:
        return _rule(name)(child, groups)
    _rule(name)  # raises for a class that cannot be computed
    return _keep(groups)
