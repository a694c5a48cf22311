"""Learning rates of the next optimizer steps, forecast on copies.

For a forecast the scheduler is deep-copied, its optimizer replaced by a stand-in that holds copies of the parameter groups
and no tensors, and the copy is stepped. Functions (`lr_lambda`, bound methods of a trainer included) are shared and not
copied. Random generators are restored afterwards, because a scheduler may draw from them.
"""

import copy
import functools
import inspect
import math
import random
import sys
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from chronicle.resume.patches import wrapped_for_torch

NUM_FORECAST = 20  # steps
NUM_FUNCTIONS = 4  # functions recorded per scheduler; a fifth was never the only one to differ
SHARED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundScheduler:
    """A scheduler as the training loop uses it: the raw object and how often it is stepped per optimizer step."""

    scheduler: Any
    unit: int = 1


class UnforeseeableLrs(Exception):
    """Nobody can tell the next learning rates; the text says why, in words."""


class StandInOptimizer:
    """Everything a scheduler needs of an optimizer: groups, defaults, and a `step` that counts as patched."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> None:
        self.param_groups = [_plain(group) for group in groups]
        self.stands_for = frozenset(map(id, groups))
        self.defaults = dict(defaults)
        self.state: dict[Any, Any] = {}
        self._opt_called = True

    @wrapped_for_torch
    def step(self) -> None:
        """Do nothing."""



def raw_scheduler(scheduler: Any) -> Any:
    """The torch scheduler behind Accelerate's wrappers."""
    for _ in range(5):
        inner = getattr(scheduler, "scheduler", None)
        if inner is None or not hasattr(inner, "step"):
            return scheduler
        scheduler = inner
    return scheduler


def raw_optimizer(optimizer: Any) -> Any:
    """The torch optimizer behind the wrappers of Accelerate, DeepSpeed and Opacus, which hand every step on to it."""
    for _ in range(5):
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "original_optimizer", None)
        if inner is None or not hasattr(inner, "param_groups"):
            return optimizer
        optimizer = inner
    return optimizer


def forecast_lrs(
    optimizers: Sequence[Any], schedulers: Sequence[BoundScheduler], k: int = NUM_FORECAST
) -> tuple[tuple[float | None, ...], ...] | None:
    """Row i holds the LR per group (all optimizers, in order) of the i-th step from now; None when it depends on a metric.

    Fewer than k rows when a scheduler ends before (OneCycleLR past `total_steps`). Raises whatever a scheduler raises that
    cannot be copied or stepped without arguments.
    """
    stand_ins = {
        id(optimizer): StandInOptimizer(optimizer.param_groups, getattr(optimizer, "defaults", None) or {})
        for optimizer in optimizers
    }
    if any(is_metric_driven(bound.scheduler) for bound in schedulers):
        return None  # ReduceLROnPlateau: the next LRs depend on future losses
    for bound in schedulers:
        if bound.unit and needed_arguments(bound.scheduler):
            name = type(bound.scheduler).__name__
            raise UnforeseeableLrs(f"the `step` of {name} needs arguments that only the script knows")
    copies = [_copy_bound(bound, stand_ins) for bound in schedulers]
    rows: list[tuple[float | None, ...]] = []
    with preserved_rng(), unchanged_groups(optimizers), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in range(k):
            rows.append(tuple(number(g.get("lr")) for s in stand_ins.values() for g in s.param_groups))
            if row + 1 < k and not all(_advance(bound) for bound in copies):
                break
    return tuple(rows)


@contextmanager
def unchanged_groups(optimizers: Sequence[Any]) -> Iterator[None]:
    """A copy of a scheduler may still reach the optimizer itself (by a closure): then its options are restored.

    Raises `UnforeseeableLrs` after restoring: such a schedule cannot be forecast.
    """
    kept = [(group, dict(group)) for one in optimizers for group in one.param_groups]
    kept_tensors = [(value, value.clone()) for _, old in kept for value in old.values() if _is_tensor(value)]
    yield
    changed = [group for group, old in kept if any(group.get(k, kept) is not v for k, v in old.items())]
    for group, old in kept:
        group.update(old)
    for tensor, old in kept_tensors:
        if not bool((tensor == old).all()):
            tensor.copy_(old)
            changed.append(tensor)
    if changed:
        raise UnforeseeableLrs("the scheduler writes to the optimizer itself, not to the one it was made with")


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "copy_") and hasattr(value, "clone")


def number(value: Any) -> float | None:
    """A number, or a tensor of one element, as a float; None for anything else."""
    if value is None or isinstance(value, (str, bytes)) or callable(value):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def far_points() -> tuple[int, ...]:
    """Steps ahead at which a schedule is evaluated: every 20th up to 400, then 5 % apart, up to two million."""
    return FAR_POINTS


def _far_points() -> Iterator[int]:
    yield from range(NUM_FORECAST, 400, NUM_FORECAST)
    point = 400.0
    while point < 2e6:
        yield int(point)
        point *= 1.05


FAR_POINTS = tuple(_far_points())


def forecast_further(bound: BoundScheduler) -> tuple[tuple[float, ...], ...]:
    """Values, far ahead, of the schedules that no checkpoint contains (`lr_lambdas`).

    One row per function, to six digits. The near steps do not show that the end of a schedule was moved.
    """
    with preserved_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(_look_ahead(function, begin, bound.unit) for function, begin in schedule_functions(bound.scheduler))


def schedule_functions(scheduler: Any) -> list[tuple[Any, int]]:
    """The functions of the step in a scheduler and its parts, each with its present step; as many as are recorded."""
    return [pair for part in _family(scheduler) for pair in _functions_of(part)][:NUM_FUNCTIONS]


def _functions_of(scheduler: Any) -> Iterator[tuple[Any, int]]:
    begin = getattr(scheduler, "last_epoch", None)
    if isinstance(begin, int) and type(scheduler).__name__ == "LambdaLR":
        functions = {id(f): f for f in getattr(scheduler, "lr_lambdas", None) or () if f is not None}
        yield from ((function, begin) for function in functions.values())


def _look_ahead(function: Any, begin: int, unit: int) -> tuple[float, ...]:
    """Values of a function of the step."""
    values: list[float] = []
    points = far_points()
    try:
        for point in points:  # nothing of the guard is called here: its errors would be taken for the function's
            value = float(function(begin + point * unit))
            if not math.isfinite(value):
                break
            values.append(float(f"{value:.6g}"))
    except Exception:  # noqa: BLE001 a table that ends, a function with a limit: known up to here
        pass
    return tuple(values)


def needed_arguments(scheduler: Any) -> tuple[str, ...]:
    """Names of the arguments without which `step` cannot be called, as in `step(epoch)`; () when it cannot be told."""
    try:
        parameters = inspect.signature(scheduler.step).parameters.values()
    except (TypeError, ValueError, AttributeError):
        return ()
    named = (one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))
    return tuple(one.name for one in named if one.default is one.empty)


def is_metric_driven(scheduler: Any) -> bool:
    """Whether `step` wants a metric (ReduceLROnPlateau, alone or inside another)."""
    if type(scheduler).__name__ == "ReduceLROnPlateau":
        return True
    return any(is_metric_driven(child) for child in getattr(scheduler, "_schedulers", ()) or ())


def _copy_bound(bound: BoundScheduler, stand_ins: Mapping[int, StandInOptimizer]) -> BoundScheduler:
    memo: dict[int, Any] = {}
    for scheduler in _family(bound.scheduler):
        owner = getattr(scheduler, "optimizer", None)
        if owner is not None:
            memo[id(owner)] = _stand_in(owner, stand_ins)
        for value in (*(getattr(scheduler, "lr_lambdas", None) or ()), *vars(scheduler).values()):
            if hasattr(value, "param_groups"):  # the optimizer under another name, wherever a class keeps it
                memo.setdefault(id(value), _stand_in(value, stand_ins))
            elif isinstance(value, SHARED) or hasattr(value, "named_parameters"):
                memo[id(value)] = value  # a function of the step, or a whole model: shared
    return BoundScheduler(scheduler=copy.deepcopy(bound.scheduler, memo), unit=bound.unit)


def _stand_in(owner: Any, stand_ins: Mapping[int, StandInOptimizer]) -> StandInOptimizer:
    """What stands for this optimizer, or for one that it shares its groups with (a wrapper and its base optimizer)."""
    known = stand_ins.get(id(raw_optimizer(owner)))
    groups = set(map(id, owner.param_groups))
    shared = next((one for one in stand_ins.values() if groups & one.stands_for), None)
    return known or shared or StandInOptimizer(owner.param_groups, {})


def _family(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for child in getattr(scheduler, "_schedulers", ()) or ():
        yield from _family(child)


def _advance(bound: BoundScheduler) -> bool:
    """Step as the training loop does per optimizer step; False when the scheduler has reached its end."""
    for _ in range(bound.unit):
        total = getattr(bound.scheduler, "total_steps", None)
        if isinstance(total, int) and getattr(bound.scheduler, "_step_count", 0) > total:
            return True  # Accelerate's wrapper stops there and keeps the last LR
        try:
            bound.scheduler.step()
        except (ValueError, StopIteration, IndexError):
            return False
    return True


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a group without its parameters; tensor values (`lr=torch.tensor`) are cloned, never shared."""
    out: dict[str, Any] = {}
    for key, value in group.items():
        if key == "params":
            out[key] = []
        elif hasattr(value, "clone") and hasattr(value, "item"):
            out[key] = value.clone()
        else:
            out[key] = copy.copy(value)
    return out


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the states of Python's, NumPy's and torch's CPU generators at the end."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    torch_state = torch.get_rng_state() if torch is not None else None
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if torch is not None:
            torch.set_rng_state(torch_state)


# ---- warm-up after a rollback ----------------------------------------------------------------------------------------

def warmed(value: Any, step: int, warmups: Sequence[tuple[int, int]]) -> Any:
    """`value` at `step` under linear warm-ups, each (first step, number of steps). The newest one replaces older ones."""
    for first, count in reversed(warmups):
        if first <= step:
            return value * (step - first + 1) / count if step < first + count else value
    return value
