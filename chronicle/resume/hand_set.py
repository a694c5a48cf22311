"""Options of the parameter groups that the script sets itself, told apart from options that a resume lost.

A script may set the LR by hand (`group["lr"] = rate`), anneal it when validation stalls, warm its momentum up, or use a
scheduler that has not torch's interface. Then the options right before the first step are not those of the save, and nothing
is wrong. The same difference is the most frequent accident of a resume. What tells them apart:

- *restored*: right after the load the option had the saved value. So the checkpoint was read, and something set it later.
- *new*: the value is not the one from before the load (the constructor's), no value that the training used earlier (a warm-up
  that starts again, a rate from before a rollback), and no other group's saved value.
- or *the next*: the LRs of the last steps went up or down by one amount, and this is the next of them, also when it happens
  to be the constructor's; or they went up and down (a rate scaled by the length of the batch), and this lies between them.
- *by hand*: no scheduler that can be forecast sets it. The launch that saved it changed it too, or it is an LR that falls.
- *sane*: a positive number, and an LR at most half as high again as any before, unless an unknown scheduler sets it. An LR that
  moved at every step is a function of the step and has no reason to jump.

Only then it is noted. Everything else stays refused. After a reload inside a process (the best model with half of its LR, a
recovery from NaN) an LR that was restored and then set is the script's answer to what it saw: *restored* and *positive* are
enough. An optimizer with a mode of its own (`train()`, `eval()`: schedule-free methods) replaces the weights when the mode
changes: the weights are then not compared.
"""

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from chronicle.resume.checks.check import Check, Outcome, not_compared
from chronicle.resume.contract import Contract, Expectation, is_close
from chronicle.resume.fingerprint import LiveState, groups_of
from chronicle.resume.learning_rate import number
from chronicle.resume.memory import LrRow, Memory, ParamGroup

LR = "lr"
OF_LR = ("learning rate per group", "learning rates of the next steps")
NUM_RECENT = 2  # different values
NUM_VALUES = 1024  # numbers of one option that are kept
FIRST = 16  # rows from the beginning of the training, which are kept for ever
SAME = 1e-6  # relative
LEAST_RECENT = 4  # steps from which a line or a range is known
LEAST_TURNS = 3
ON_LINE = 1e-3  # relative: of one step to the next
SMALL_STEP = 0.05  # relative: of an option that moves
HIGHER = 1.5  # than any LR before
OWN_MODE = "the optimizer's own mode: it is switched by `optimizer.train()` and `optimizer.eval()`"
REPLACED = "the optimizer replaces the weights when its mode changes (`optimizer.train()`), so they are not those of the save"
SET_BY_SCRIPT = "restored, and then set by the script itself to a value that this training has not used before"
SET_AFTER_RELOAD = "a reload in this process: restored, and then set by the script itself"
NOT_OPTIONS = ("params", "initial_lr", "max_lr", "min_lr", "step")

RowsOf = weakref.WeakKeyDictionary[Any, dict[str, LrRow]]  # by optimizer, and by the name of the option


def option_rows(optimizers: Iterable[Any]) -> dict[str, LrRow]:
    """Every option that is a number, in all parameter groups in order: name -> one value per group."""
    groups = [group for _, group in groups_of(optimizers)]
    names = {name for group in groups for name, value in group.items() if _is_number(value) and name not in NOT_OPTIONS}
    return {name: tuple(number(group.get(name)) for group in groups) for name in sorted(names)}


def _is_number(value: Any) -> bool:
    return not isinstance(value, (bool, str)) and number(value) is not None


class HandSet:
    """What one process knows of the options of its parameter groups. `used`: every option's values so far, oldest first."""

    def __init__(self) -> None:
        self.used: dict[str, list[LrRow]] = {}
        self._before: RowsOf = weakref.WeakKeyDictionary()  # right before the latest load of an optimizer
        self._loaded: RowsOf = weakref.WeakKeyDictionary()  # right after it

    def before_load(self, optimizers: Iterable[Any]) -> None:
        """A state is about to be loaded: what the options are now is what the script's constructor gave."""
        for optimizer in optimizers:
            self._before[optimizer] = option_rows((optimizer,))
            self._loaded.pop(optimizer, None)

    def after_load(self, optimizers: Iterable[Any]) -> None:
        """A state was loaded, and nothing else has set an option yet."""
        for optimizer in optimizers:
            self._loaded[optimizer] = option_rows((optimizer,))

    def resumes(self, memory: Memory | None) -> None:
        """The training goes on from this memory: its past is ours."""
        self.used = {name: [tuple(row) for row in rows] for name, rows in (memory.used if memory else {}).items()}

    def see_lrs(self, lrs: LrRow) -> None:
        """The LRs of one optimizer step, when they are not those of the step before."""
        self._see(LR, lrs)

    def see(self, optimizers: Iterable[Any]) -> None:
        """The other options: at the first step of a launch and at its saves."""
        for name, row in option_rows(optimizers).items():
            if name != LR:
                self._see(name, row)

    def _see(self, name: str, row: LrRow) -> None:
        rows = self.used.setdefault(name, [])
        if row in rows[-2:] or (len(rows) <= FIRST and row in rows):
            return
        rows.append(row)
        if len(rows) * max(1, len(row)) > NUM_VALUES and len(rows) > FIRST + 2:
            del rows[FIRST]

    def record(self) -> dict[str, tuple[LrRow, ...]]:
        """What a checkpoint carries: the LRs, and the options that ever moved."""
        return {name: tuple(rows) for name, rows in self.used.items() if name == LR or len(rows) > 1}

    # ---- the first step --------------------------------------------------------------------------------------------

    def judge(
        self,
        checks: Sequence[Check],
        expected: Expectation | None,
        found: Memory,
        live: LiveState,
        last: Contract | None,
        *,
        again: bool = False,
    ) -> list[Check]:
        """The checks of a first step; what the script set itself is noted.

        `last`: the run's last rollback, also a past one. `again`: the state was loaded in a process that had trained before.
        """
        memory = expected.memory if expected else None
        if expected is None or memory is None or expected.contract is not None or len(memory.groups) != len(found.groups):
            return list(checks)
        swapped = swapped_modes(memory, found, live)
        out = []
        for check in checks:
            option = LR if check.name in OF_LR else check.name
            if check.ok:
                out.append(check)
            elif check.name in swapped:
                out.append(replace(check, outcome=Outcome.NOTED, cause=OWN_MODE))
            elif check.name == "weights" and swapped:
                out.append(not_compared(check.name, check.code, REPLACED, where=check.where))
            elif again and option == LR and self._is_restored_and_set(memory, found, live):
                out.append(replace(check, outcome=Outcome.NOTED, cause=SET_AFTER_RELOAD))
            elif self._is_set_by_script(option, expected, found, live, last):
                out.append(replace(check, outcome=Outcome.NOTED, cause=SET_BY_SCRIPT))
            else:
                out.append(check)
        return out

    def _is_restored_and_set(self, memory: Memory, found: Memory, live: LiveState) -> bool:
        """Whether the load gave every LR its saved value, and something made another positive number of some of them."""
        saved, now, read = _row(LR, memory.groups), _row(LR, found.groups), _rows_of(LR, self._loaded, live)
        restored = len(read) == len(saved) and all(_same(old, one) for old, one in zip(saved, read, strict=True))
        return restored and all(new is not None and 0 < new < math.inf for new in now)

    def _is_set_by_script(
        self, name: str, expected: Expectation, found: Memory, live: LiveState, last: Contract | None
    ) -> bool:
        """Whether this option is the script's own doing; False when it may have been lost."""
        memory = expected.memory or Memory()
        saved, now = _row(name, memory.groups), _row(name, found.groups)
        read, built = _rows_of(name, self._loaded, live), _rows_of(name, self._before, live)
        if not read and name == LR and expected.lr_set_by_hand:  # the trainer loads by itself: nobody saw the load
            read, built = saved, (None,) * len(saved)
        if len({len(saved), len(now), len(read), len(built)}) > 1:
            return False
        rows = (*memory.used.get(name, ()), *(memory.recent_lrs if name == LR else ()))
        past = [tuple(row) for row in rows if len(row) == len(saved)]
        unknown = "next_lrs" in memory.unknown or "next_lrs" in found.unknown
        moved = len(set(past)) > 1
        if name != LR and not moved:
            return False  # a script's argument must not silently overrule the checkpoint
        if name == LR and memory.schedulers and not unknown and memory.lr_source != "manual":
            return False  # a scheduler sets it
        limit = jump = math.inf
        if name == LR and _is_smooth(memory.recent_lrs):
            jump = max(HIGHER, expected.allowed_jump())
        if name == LR and not unknown:
            limit = min(jump, max(HIGHER, expected.allowed_jump())) if moved else 1.0
        changed = [index for index, old in enumerate(saved) if not _same(old, now[index])]
        recent = memory.recent_lrs if name == LR else ()
        if changed and all(
            _same(saved[index], read[index]) and _follows([row[index] for row in recent if len(row) == len(saved)], now[index])
            for index in changed
        ):
            return True
        return bool(changed) and all(
            _is_own_value(index, saved, now[index], read[index], built[index], past, limit, jump)
            and not (name == LR and _undoes(last, saved[index], now[index]))
            for index in changed
        )


def _is_own_value(
    index: int,
    saved: LrRow,
    new: float | None,
    read: float | None,
    built: float | None,
    past: Sequence[LrRow],
    limit: float,
    jump: float,
) -> bool:
    """One group. `limit`: how many times the highest value before it may be, `jump`: the factor to the saved one."""
    old = saved[index]
    if old is None or new is None or not _same(old, read) or not math.isfinite(new) or new <= 0:
        return False
    earlier = [row[index] for row in past if not _same(row[index], old)]
    again = [value for value in earlier[:1] + earlier[-NUM_RECENT:] if value is not None]  # the beginning, and what came last
    again += [value for value in earlier if value is not None and value > old]  # a falling rate may meet one of its warm-up
    if len(set(past)) > 1 and is_close(new, old, SMALL_STEP):
        return True  # it goes on to move
    others = [value for place, value in enumerate(saved) if place != index and not _same(value, old)]
    if _same(new, built) or any(_same(new, value) for value in (*again, *others)):
        return False
    highest = max((value for value in (old, *earlier) if value is not None), default=old)
    return (math.isinf(limit) or new <= limit * highest) and (old <= 0 or max(new / old, old / new) <= jump)


def _follows(recent: Sequence[float | None], new: float | None) -> bool:
    """Whether a number is the next of those of the last steps: on their line, or in the range in which they go up and down."""
    values = [value for value in recent if value is not None]
    if new is None or not math.isfinite(new) or new <= 0 or len(values) < LEAST_RECENT or len(values) < len(recent):
        return False
    steps = [b - a for a, b in pairwise(values)]
    turns = sum(a * b < 0 for a, b in pairwise([step for step in steps if step]))
    if turns * 4 >= len(steps) and turns >= LEAST_TURNS:
        return min(values) <= new <= max(values)
    last = steps[-3:]
    line = bool(last[0]) and all(math.isclose(step, last[0], rel_tol=ON_LINE) for step in last)
    return line and math.isclose(new - values[-1], last[0], rel_tol=ON_LINE)


def _is_smooth(rows: Sequence[LrRow]) -> bool:
    """Whether the LR moved at most of the last steps: then it is a function of the step, and has no reason to jump."""
    return sum(a != b for a, b in pairwise(rows)) * 2 >= max(1, len(rows) - 1)


def _undoes(last: Contract | None, old: float | None, new: float | None) -> bool:
    """Whether this is the LR from before the run's last rollback."""
    ratio = last.lr_ratio if last is not None else None
    return bool(ratio and ratio != 1 and old is not None and new is not None and is_close(new * ratio, old, 0.05))


def swapped_modes(memory: Memory, found: Memory, live: LiveState) -> set[str]:
    """Flags of parameter groups that changed, of optimizers that have a mode of their own."""
    names: set[str] = set()
    owners = [optimizer for optimizer, _ in groups_of(live.optimizers)]
    for owner, saved, own in zip(owners, memory.groups, found.groups, strict=False):
        if callable(getattr(owner, "train", None)) and callable(getattr(owner, "eval", None)):
            both = saved.settings.keys() & own.settings.keys()
            changed = {name for name in both if saved.settings[name] != own.settings[name]}
            names |= {name for name in changed if isinstance(saved.settings[name], bool)}
    return names


def _row(name: str, groups: Sequence[ParamGroup]) -> LrRow:
    return tuple(_option(group, name) for group in groups)


def _rows_of(name: str, known: RowsOf, live: LiveState) -> LrRow:
    """The values of all groups; empty for an optimizer whose load was not seen."""
    rows = [known[one].get(name) or (None,) * len(one.param_groups) if one in known else () for one in live.optimizers]
    return tuple(value for row in rows for value in row)


def _option(group: ParamGroup, name: str) -> float | None:
    if name in (LR, "weight_decay"):
        value: Any = getattr(group, name)
    else:
        value = group.settings.get(name)
    return None if isinstance(value, (bool, str, list)) else number(value)


def _same(a: float | None, b: float | None) -> bool:
    return a is b or (a is not None and b is not None and is_close(a, b, SAME))
