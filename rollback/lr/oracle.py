"""The next LRs of a saved scheduler, computed without torch from its state and the optimizer's groups.

Schedulers, composite ones included, are stepped over plain dictionaries. Each rule repeats the arithmetic of
`torch/optim/lr_scheduler.py` (2.13) and `accelerate/scheduler.py` (1.15) in the same order of operations, so the result
is bit-identical for Python floats and for LRs kept as float32. The answer is `Unknown` for a scheduler whose function is
not saved (LambdaLR, MultiplicativeLR, CyclicLR with a custom `scale_fn`), and for a state whose saved LR is not what its
own class gives at its own counter: it was edited by hand, or the class is another one. Pure.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rollback.lr.rules import (
    FOREIGN,
    CannotCompute,
    Groups,
    SchedulerClass,
    State,
    as_kept,
    closed_form,
    infer_scheduler_class,
    is_single,
    keep_lrs,
    move_warm_restart,
    rule_of,
    write_lrs,
)

_REPLAY_LIMIT_STEPS = 200_000


def advance_optimizer_step(state: State, groups: Groups, scheduler_steps: int) -> None:
    """Step a scheduler as often as one optimizer step does; `state` and `groups` are changed in place."""
    for _ in range(scheduler_steps):
        # Accelerate's wrapper stops a scheduler that has `total_steps` once it has been stepped that often
        if scheduler_steps > 1 and state.get("_step_count", 0) > state.get("total_steps", math.inf):
            continue
        step_once(state, groups)


def step_once(state: State, groups: Groups) -> None:
    """`scheduler.step()`: move the counter, write the new LRs into the groups and into `_last_lr`."""
    name = infer_scheduler_class(state)
    if name is SchedulerClass.SEQUENTIAL:
        _step_sequential(state, groups)
    elif name is SchedulerClass.CHAINED:
        for child in state["_schedulers"]:
            step_once(_plain_part(child), groups)
    elif name is SchedulerClass.PLATEAU:
        raise CannotCompute("ReduceLROnPlateau depends on a metric that is not known yet")
    else:
        state["_step_count"] = state.get("_step_count", 0) + 1
        state["last_epoch"] += 1
        if name is SchedulerClass.WARM_RESTARTS:
            move_warm_restart(state)
        write_lrs(state, groups, rule_of(name)(state, groups))
    state["_last_lr"] = [group["lr"] for group in groups]


def _step_sequential(state: State, groups: Groups) -> None:
    state["last_epoch"] += 1
    index = bisect_right(state["_milestones"], state["last_epoch"])
    child = _plain_part(state["_schedulers"][index])
    if index > 0 and state["_milestones"][index - 1] == state["last_epoch"]:
        child["last_epoch"] = 0  # torch starts the next scheduler by its closed form at zero
        write_lrs(child, groups, closed_form(child, groups))
        child["_last_lr"] = [group["lr"] for group in groups]
    else:
        step_once(child, groups)


def _plain_part(child: Any) -> Any:
    """A part of a composite; raises `CannotCompute` for a composite, at whose milestone torch itself may raise."""
    if "_schedulers" in child:
        raise CannotCompute("a composite scheduler inside another one is not foretold")
    return child


def lr_from_scratch(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[float] | None:
    """What the class gives at the saved counter; `None` where only the past metrics could tell (Plateau)."""
    name = infer_scheduler_class(state)
    if name is SchedulerClass.PLATEAU:
        return None
    if name is SchedulerClass.CHAINED:
        return _replay_chain(state["_schedulers"], groups)
    if name is not SchedulerClass.SEQUENTIAL:
        return closed_form(state, groups)
    index = bisect_right(state["_milestones"], state["last_epoch"])
    active = _plain_part(state["_schedulers"][index])
    initial = [group.get("initial_lr") for group in groups]
    if not index and "base_lrs" in active and None not in initial:
        active = {**active, "base_lrs": initial}  # it began from `initial_lr`, which a OneCycleLR further on may have changed
    return lr_from_scratch(active, groups)


def _replay_chain(children: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> list[float]:
    """Run a chain from its first step: a product of recursions has no closed form once one has an `eta_min`."""
    live = [copy.deepcopy(dict(_plain_part(child))) for child in children]
    steps = max(map(last_epoch, live))
    if steps > _REPLAY_LIMIT_STEPS:
        raise CannotCompute(f"a ChainedScheduler of {steps} steps is too long to replay")
    live_groups = [dict(group) for group in groups]
    write_lrs({}, live_groups, live[0]["base_lrs"])
    for child in live:
        child.update(last_epoch=0, _step_count=1)
        if infer_scheduler_class(child) is SchedulerClass.WARM_RESTARTS:
            child.update(T_cur=0, T_i=child["T_0"])
        write_lrs(child, live_groups, _initial(child, live_groups))
    for _ in range(steps):
        for child in live:
            step_once(child, live_groups)
    return keep_lrs(live_groups)


def last_epoch(state: Mapping[str, Any]) -> int:
    """The counter of a scheduler; of a chain, the largest of its parts."""
    return int(state["last_epoch"]) if "last_epoch" in state else max(map(last_epoch, state["_schedulers"]))


def _initial(child: State, groups: Groups) -> list[float]:
    """The step a constructor takes: only the classes that act at `last_epoch == 0` change the LR there."""
    name = infer_scheduler_class(child)
    acting = (SchedulerClass.CONSTANT, SchedulerClass.LINEAR, SchedulerClass.WARM_RESTARTS, SchedulerClass.CYCLIC)
    if name in acting or name is SchedulerClass.ONE_CYCLE:
        return rule_of(name)(child, groups)
    rule_of(name)  # raises for a class that cannot be computed
    return keep_lrs(groups)


# --- The forecast

LrTable: TypeAlias = tuple[tuple[float, ...], ...]

_RELATIVE_TOLERANCE = 1e-6  # closed form against torch's recursion: rounding only
_ABSOLUTE_TOLERANCE = 1e-9  # of the base LR, where a curve touches zero
_SINGLE_ROUNDING, _MOST_ROUNDING = 2.0**-23, 0.01  # float32 rounding per step, and the most that is allowed in total


@dataclass(frozen=True, slots=True)
class Unknown:
    """The LRs cannot be computed; `reason` says why. `contradicts`: the file disagrees with itself."""

    reason: str
    contradicts: bool = False


def next_lrs(
    state: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    k: int,
    *,
    scheduler_steps: int = 1,
) -> LrTable | Unknown:
    """LRs of the next `k` optimizer steps, one row a step, one column a parameter group.

    Row 0 is the groups' own `lr`, which the first step after loading uses. `scheduler_steps` is how often the
    trainer steps the scheduler per optimizer step (Accelerate's prepared schedulers: `num_processes`).
    """
    reproduced = reproduces_saved_lr(state, groups)
    if isinstance(reproduced, Unknown):
        return reproduced
    return simulate_lrs(state, groups, k, scheduler_steps=scheduler_steps)


def simulate_lrs(
    state: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    k: int,
    *,
    scheduler_steps: int = 1,
    rounded: bool = True,
) -> LrTable | Unknown:
    """As `next_lrs`, but without the check that the class reproduces the saved LR.

    `rounded=False` computes in double precision even where the file stores float32: for proofs about the schedule.
    """
    if infer_scheduler_class(state) in FOREIGN:
        return Unknown(f"the LRs of a {infer_scheduler_class(state)} are not computed here")
    live, live_groups = as_kept(state, rounded=rounded), as_kept(groups, rounded=rounded)
    rows: list[tuple[float, ...]] = []
    try:
        for row in range(k):
            rows.append(tuple(float(group["lr"]) for group in live_groups))
            if row + 1 < k:
                advance_optimizer_step(live, live_groups, scheduler_steps)
    except CannotCompute as problem:
        return Unknown(str(problem))
    except _MALFORMED as problem:
        return Unknown(_malformed(problem))
    return tuple(rows)


def reproduces_saved_lr(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Unknown | None:
    """`None` when the inferred class, at the saved counter, gives the saved `_last_lr` and the groups hold it too."""
    name = infer_scheduler_class(state)
    if name is None:
        return Unknown(f"no known scheduler class has the keys {sorted(map(str, state))}")
    if name is SchedulerClass.DEEPSPEED:
        return Unknown("DeepSpeed's own schedulers keep their LRs in the DeepSpeed config, not in the checkpoint")
    if name in FOREIGN:
        return Unknown(f"the LRs of a {name} are not computed here")
    saved, held = state.get("_last_lr"), [group.get("lr") for group in groups]
    if not _plain(saved) or not _plain(held):
        return Unknown("an LR is kept as a tensor or numpy scalar, not as a Python float")
    if list(saved) != held:  # type: ignore[arg-type]
        return Unknown(f"the scheduler's _last_lr {saved} and the optimizer's lr {held} disagree")
    try:
        given = lr_from_scratch(state, groups)
    except CannotCompute as problem:
        return Unknown(str(problem))
    except _MALFORMED as problem:
        return Unknown(_malformed(problem), contradicts=True)
    rounding = _rounding(state, groups)
    if given is not None and len(given) != len(held):
        reason = f"{name} holds {len(given)} base LRs, the optimizer has {len(held)} parameter groups: another optimizer's?"
        return Unknown(reason, contradicts=True)
    if given is not None and not all(_close(*each, rounding) for each in zip(given, held, _bases(state, groups), strict=True)):
        return Unknown(
            f"{name} would be at {given} by its own fields, the checkpoint holds {held}: edited before, or another class?",
            contradicts=True,
        )
    return None


_MALFORMED = (LookupError, AttributeError, TypeError, ValueError, ZeroDivisionError, OverflowError)


def _malformed(problem: Exception) -> str:
    return f"the scheduler state is malformed ({type(problem).__name__}: {problem})"


def _plain(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    )


def _close(given: float, held: float, base: float, rounding: float) -> bool:
    absolute = (_ABSOLUTE_TOLERANCE + rounding) * abs(base)
    return math.isclose(given, held, rel_tol=_RELATIVE_TOLERANCE + rounding, abs_tol=absolute)


def _rounding(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> float:
    """The largest relative difference that float32 rounding can cause between recursion and closed form."""
    if not any(is_single(group.get("lr")) for group in groups):
        return 0.0
    return min(_MOST_ROUNDING, _SINGLE_ROUNDING * last_epoch(state))


def _bases(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[float]:
    return [max(float(group.get("initial_lr") or 0.0), float(group["lr"])) for group in groups]
