"""The next LRs of a saved scheduler, computed without torch from its state and the optimizer's groups.

Every rule repeats the arithmetic of `torch/optim/lr_scheduler.py` (2.13) in the same order of operations, so that the
result is bit-identical for Python floats, and for LRs kept as float32 (`rollback.lr.single`). A scheduler whose
function is not saved (LambdaLR, MultiplicativeLR, CyclicLR with a custom `scale_fn`) is answered with `Unknown`, and so
is a state whose saved LR is not what its own class gives at its own counter: it was edited by hand, or the class is
another one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rollback.lr.infer import SchedulerClass, infer_scheduler_class
from rollback.lr.rules import CannotCompute
from rollback.lr.single import as_kept, is_single
from rollback.lr.stepping import advance_optimizer_step, last_epoch, lr_from_scratch

LrTable: TypeAlias = tuple[tuple[float, ...], ...]

_RELATIVE_TOLERANCE = 1e-6  # closed form against torch's recursion: rounding only
_ABSOLUTE_TOLERANCE = 1e-9  # of the base LR, where a curve touches zero
_SINGLE_ROUNDING, _MOST_ROUNDING = 2.0**-23, 0.01  # of float32, a step; and what so many steps may come to


@dataclass(frozen=True, slots=True)
class Unknown:
    """The answer "cannot be computed", with the reason in words."""

    reason: str


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
    rounded: bool = True,
) -> LrTable | Unknown:
    """As `next_lrs`, without asking first whether the saved LR is the one the class would give.

    `rounded=False`: in double precision whatever the file keeps, for what is to be proved of the schedule itself.
    """
    live, live_groups = as_kept(state, rounded=rounded), as_kept(groups, rounded=rounded)
    values = iter(metrics if metrics is not None else ())
    rows: list[tuple[float, ...]] = []
    try:
        for row in range(k):
            rows.append(tuple(float(group["lr"]) for group in live_groups))
            if row + 1 < k:
                advance_optimizer_step(live, live_groups, scheduler_steps, values)
    except CannotCompute as problem:
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
        given = lr_from_scratch(state, groups)
    except CannotCompute as problem:
        return Unknown(str(problem))
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as problem:
        return Unknown(f"the scheduler state is malformed ({type(problem).__name__}: {problem})")
    rounding = _rounding(state, groups)
    if given is not None and not all(_close(*each, rounding) for each in zip(given, held, _bases(state, groups), strict=True)):
        return Unknown(f"{name} would be at {given} by its own fields, the checkpoint holds {held}: edited before?")
    return None


def _plain(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    )


def _close(given: float, held: float, base: float, rounding: float) -> bool:
    absolute = (_ABSOLUTE_TOLERANCE + rounding) * abs(base)
    return math.isclose(given, held, rel_tol=_RELATIVE_TOLERANCE + rounding, abs_tol=absolute)


def _rounding(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> float:
    """How far float32 may have carried torch's recursion from the closed form: one rounding a step."""
    if not any(is_single(group.get("lr")) for group in groups):
        return 0.0
    return min(_MOST_ROUNDING, _SINGLE_ROUNDING * last_epoch(state))


def _bases(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[float]:
    return [max(float(group.get("initial_lr") or 0.0), float(group["lr"])) for group in groups]
