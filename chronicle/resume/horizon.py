"""A schedule that was made longer: told apart from any other change of a schedule, and named by the number that changed.

Schedules that are functions of the step (transformers, diffusers, most `LambdaLR`) take their length from the script's
arguments, and no checkpoint contains it. At a save the numbers bound in each function are recorded: arguments of a `partial`,
variables of a closure, globals, defaults. At a resume the changed number is put back: when the function then gives the
recorded values at every point far ahead, this one number is the whole change. The schedule is longer when the number grew, it
lies ahead of the present step, and no LR from here on is lower than it was. Then the change is noted; any other is refused.
"""

import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chronicle.resume.checks.check import Check, Outcome, noted
from chronicle.resume.contract import Expectation
from chronicle.resume.learning_rate import BoundScheduler, far_points, schedule_functions
from chronicle.resume.memory import Scheduler

__all__ = ["SCHEDULE", "bound_numbers", "note_longer_schedule"]

SCHEDULE = "schedule"
ABOUT_THE_FUTURE = ("learning rates of the next steps", "schedule further on")
MAX_NUMBERS = 32  # of one function
CLOSE = 2e-5  # relative: far values are recorded to six digits


def bound_numbers(bound: BoundScheduler) -> tuple[Mapping[str, float], ...]:
    """The numbers bound in each function of a scheduler, by name, in the order of its functions."""
    return tuple(dict(list(_numbers(function))[:MAX_NUMBERS]) for function, _ in schedule_functions(bound.scheduler))


def note_longer_schedule(
    checks: Sequence[Check], expected: Expectation | None, schedulers: Sequence[BoundScheduler]
) -> list[Check]:
    """The checks; when all that differs in the LRs ahead is a longer horizon, one note with both numbers replaces them."""
    different = [check for check in checks if check.outcome is Outcome.DIFFERENT and check.name in ABOUT_THE_FUTURE]
    memory = expected.memory if expected else None
    if not different or memory is None or (expected and expected.contract) or len(memory.schedulers) != len(schedulers):
        return list(checks)
    changes = [_change(saved, bound) for saved, bound in zip(memory.schedulers, schedulers, strict=True)]
    if None in changes or not any(changes):
        return list(checks)
    names = {(change.name, change.before, change.after) for change in changes if change}
    text = "; ".join(f"{before:,.10g} → {after:,.10g} steps (`{name}`)" for name, before, after in sorted(names))
    note = noted(
        SCHEDULE,
        "M2",
        expected="; ".join(f"{before:,.10g} steps" for _, before, _ in sorted(names)),
        found="; ".join(f"{after:,.10g} steps" for _, _, after in sorted(names)),
        where="function of the scheduler",
        cause=f"{text}: nothing else about it changed, and no LR ahead is lower",
    )
    return [*(check for check in checks if check not in different), note]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One number of a schedule: its name, and its value before and after. False when nothing changed."""

    name: str = ""
    before: float = 0
    after: float = 0

    def __bool__(self) -> bool:
        return bool(self.name)


def _change(saved: Scheduler, bound: BoundScheduler) -> Change | None:
    """What changed in one scheduler: nothing (false), a longer horizon, or None for anything else."""
    functions = list(schedule_functions(bound.scheduler))
    own = bound_numbers(bound)
    if len(saved.bound) != len(own) or len(saved.further) != len(functions):
        return None
    if not functions:
        return Change()
    changed = {
        (name, before[name], after[name])
        for before, after in zip(saved.bound, own, strict=True)
        for name in before.keys() | after.keys()
        if name in before and name in after and before[name] != after[name]
    }
    if any(before.keys() != after.keys() for before, after in zip(saved.bound, own, strict=True)) or len(changed) > 1:
        return None
    if not changed:
        return Change()
    ((name, before, after),) = changed
    now = saved.last_epoch
    if now is None or not after > before >= now:
        return None
    for (function, begin), numbers, recorded in zip(functions, own, saved.further, strict=True):
        old = _rebuilt(function, name, before) if name in numbers else function
        if old is None or begin != now or not _is_longer(function, old, recorded, begin, bound.unit):
            return None
    return Change(name=name, before=before, after=after)


def _is_longer(
    function: Callable[[int], Any], old: Callable[[int], Any], recorded: Sequence[float], begin: int, unit: int
) -> bool:
    """Whether `old` is the schedule of the save, and `function` nowhere below it from here on."""
    for index, point in enumerate(far_points()):
        if index >= len(recorded):
            break
        value, before = float(function(begin + point * unit)), float(old(begin + point * unit))
        if not math.isfinite(value) or abs(before - recorded[index]) > CLOSE * max(abs(before), abs(recorded[index])):
            return False
        if value < before - CLOSE * abs(before):
            return False
    near = range(begin, begin + 20 * unit, unit)
    return all(float(function(step)) >= float(old(step)) * (1 - CLOSE) for step in near)


# ---- the numbers that are bound in a function, and the same function with another number -----------------------------


def _numbers(function: Any) -> Iterator[tuple[str, float]]:
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


def _rebuilt(function: Any, name: str, value: float) -> Callable[[int], Any] | None:
    """The same function with one of its numbers replaced; None where that is not possible."""
    if isinstance(function, functools.partial):
        if name in function.keywords:
            return functools.partial(function.func, *function.args, **{**function.keywords, name: value})
        arguments = [value if name == f"argument {index}" else one for index, one in enumerate(function.args)]
        return functools.partial(function.func, *arguments, **function.keywords)
    if not isinstance(function, types.FunctionType):
        return None
    code, owner = function.__code__, name.partition(".")[0]
    cells = list(function.__closure__ or ())
    values, defaults = dict(function.__globals__), list(function.__defaults__ or ())
    first = code.co_argcount - len(defaults)
    if owner in code.co_freevars:
        place = code.co_freevars.index(owner)
        cells[place] = types.CellType(_put(cells[place].cell_contents, name, value))
    elif owner in code.co_varnames[first : code.co_argcount]:
        defaults[code.co_varnames.index(owner) - first] = value
    elif owner in values:
        values[owner] = _put(values[owner], name, value)
    else:
        return None
    return types.FunctionType(code, values, function.__name__, tuple(defaults), tuple(cells))


def _put(old: Any, name: str, value: float) -> Any:
    """`value` itself, or a copy of the namespace `old` with one attribute replaced."""
    _, dot, attribute = name.partition(".")
    return types.SimpleNamespace(**{**vars(old), attribute: value}) if dot else value


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
