"""A schedule that was made longer: told apart from any other change of a schedule, and named by the number that changed.

Schedules that are functions of the step (transformers, diffusers, most `LambdaLR`) take their length from the script's
arguments, and no checkpoint contains it. At a save the numbers bound in each function are recorded: arguments of a `partial`,
variables of a closure, globals, defaults. The schedule is longer when one of these numbers is another one, it grew, it
lies ahead of the present step, and no LR from here on is lower than it was. Then the change is noted; any other is refused.

The plan of the LR, looked at before the first step: is there any, does it end its warm-up, does it last? Pure. A scheduler
that is stepped once a micro-batch, or was made for micro-batches, ends too early or never. What is found is said and never
refused.
"""

import functools
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from chronicle.resume.checks.check import Check, noted
from chronicle.resume.first_batch import BatchFault
from chronicle.resume.learning_rate import BoundScheduler, schedule_functions
from chronicle.resume.memory import LrRow, Memory, Scheduler

SCHEDULE = "schedule"
ABOUT_THE_FUTURE = ("learning rates of the next steps", "schedule further on")
ABOUT_LRS = (*ABOUT_THE_FUTURE, "learning rate per group")
MAX_NUMBERS = 32  # of one function
CLOSE = 2e-5  # relative: far values are recorded to six digits

Change = tuple[str, float, float]  # name of a number, its value before and after


def bound_numbers(bound: BoundScheduler) -> tuple[Mapping[str, float], ...]:
    """The numbers bound in each function of a scheduler, by name, in the order of its functions."""
    return tuple(dict(list(numbers_used_by(function))[:MAX_NUMBERS]) for function, _ in schedule_functions(bound.scheduler))


def longer_schedule(memory: Memory, found: Memory) -> Check | None:
    """The note, where all that can differ in the LRs ahead is a longer horizon; None for anything else."""
    if len(memory.schedulers) != len(found.schedulers) or not _is_nowhere_lower(memory.next_lrs or (), found.next_lrs or ()):
        return None
    changes: set[Change] = set()
    for saved, own in zip(memory.schedulers, found.schedulers, strict=True):
        change = _change(saved, own)
        if change is None:
            return None
        changes |= change
    if not changes:
        return None
    listed = sorted(changes)
    text = "; ".join(f"{before:,.10g} → {after:,.10g} steps (`{name}`)" for name, before, after in listed)
    return noted(
        SCHEDULE,
        "M2",
        expected="; ".join(f"{before:,.10g} steps" for _, before, _ in listed),
        found="; ".join(f"{after:,.10g} steps" for _, _, after in listed),
        where="function of the scheduler",
        cause=f"{text}: no other number of it changed, and no LR ahead is lower",
    )


def _change(saved: Scheduler, own: Scheduler) -> set[Change] | None:
    """What changed in one scheduler: nothing, one number that is a longer horizon, or None for anything else."""
    if len(saved.bound) != len(own.bound):
        return None
    changed: set[Change] = set()
    for before, after in zip(saved.bound, own.bound, strict=True):
        if before.keys() != after.keys():
            return None
        changed |= {(name, before[name], after[name]) for name in before if before[name] != after[name]}
    if not changed:
        return changed
    (_, old, new), *more = changed
    now = saved.last_epoch
    if more or now is None or own.last_epoch != now or not new > old >= now:
        return None
    return changed if _is_nowhere_lower(saved.further, own.further) else None


def _is_nowhere_lower(saved: Sequence[LrRow], own: Sequence[LrRow]) -> bool:
    """Whether no value is lower than it was; both tables have the same rows."""
    if len(saved) != len(own):
        return False
    pairs = [pair for before, after in zip(saved, own, strict=True) for pair in zip(before, after, strict=False)]
    return all(b is a or (a is not None and b is not None and b >= a - CLOSE * abs(a)) for a, b in pairs)


# ---- the numbers that are bound in a function --------------------------------------------------------------------------


def numbers_used_by(function: Any) -> Iterator[tuple[str, float]]:
    """(name, number) bound in a function: arguments of a partial, a closure, defaults, globals that it reads."""
    if isinstance(function, functools.partial):
        yield from _plain_of(function.keywords)
        yield from _plain_of({f"argument {index}": value for index, value in enumerate(function.args)})
    elif isinstance(function, types.FunctionType):
        code = function.__code__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
        for name, cell in cells.items():
            yield from _with_parts(name, _content(cell), code.co_names)
        defaults = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        yield from _plain_of(dict(zip(names, defaults, strict=False)))
        for name in code.co_names:
            if name in function.__globals__:
                yield from _with_parts(name, function.__globals__[name], code.co_names)


def _with_parts(name: str, value: Any, used: Sequence[str]) -> Iterator[tuple[str, float]]:
    """A number, or the numbers of a namespace of arguments (`args.max_steps`) that the function names."""
    if type(value).__name__ in ("Namespace", "SimpleNamespace"):
        yield from _plain_of({f"{name}.{key}": part for key, part in vars(value).items() if key in used})
    else:
        yield from _plain_of({name: value})


def _plain_of(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield name, value


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # not filled yet


# ---- faults of a planned learning rate ---------------------------------------------------------------------------------


MIN_PLANNED = 8  # optimizer steps: a shorter plan has no shape


@dataclass(frozen=True, slots=True, kw_only=True)
class LrCurve:
    """The LR of the first group at every optimizer step from 0 on, as far as it was computed.

    `horizon`: what the scheduler itself was made with, in its own steps. None: unknown.
    """

    lrs: tuple[float, ...]
    planned: int | None = None  # optimizer steps of the run
    accumulation: int = 1
    horizon: int | None = None


def find_in_plan(plan: LrCurve) -> list[BatchFault]:
    """What is wrong with the LR's plan; the first that is found."""
    planned = plan.planned
    if planned is None or planned < MIN_PLANNED or len(plan.lrs) < planned:
        return []
    lrs = plan.lrs[:planned]
    peak = max(lrs)
    unit = "; it may count micro-batches" if plan.accumulation > 1 else ""
    dead = planned
    while dead and lrs[dead - 1] <= 1e-6 * peak:
        dead -= 1
    if peak <= 0:
        return [BatchFault(name="lr-zero", text=f"the LR is 0 in all {planned} planned steps: nothing is learned")]
    if planned - dead > max(2, planned // 10):
        text = f"the LR is 0 from step {dead} of {planned} planned steps on: nothing is learned after it"
        return [BatchFault(name="lr-ends-early", text=text + unit)]
    if lrs[-1] > 1.2 * lrs[0] and all(a <= b for a, b in pairwise(lrs)):
        text = f"the LR still rises at the last of {planned} planned steps: the warm-up never ends"
        return [BatchFault(name="warm-up-never-ends", text=text + unit)]
    return []
