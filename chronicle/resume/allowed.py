"""What a difference from the save may be excused by: five allowances, and nothing else. Pure.

*As in the first pass*: so it was right before the step that followed this save; where that step was never taken, what this
training is known to do by itself. *A longer schedule*: one number of it grew, and no LR ahead is lower. *Accepted by name*: a
person said so (`rules.judge`). *Rounded*: the script saved in half precision. *Carried on in one process*: after a reload the
loop goes on from where it was.

Options that a script sets by hand (an LR that is annealed, a momentum that is warmed up) are the most frequent accident of a
resume too. What tells them apart where the next step of the first pass is not known:
- *restored*: right after the load the option had the saved value; so the checkpoint was read, and something set it later;
- *new*: not the constructor's value, none that the training used before, no other group's, and no higher than it may be;
- or *the next* of the last steps: on their line, or in the range in which they go up and down.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from chronicle.resume.checks.check import Check, Outcome, not_compared
from chronicle.resume.checks.memory import options_of
from chronicle.resume.contract import Contract, Expectation, is_close
from chronicle.resume.horizon import ABOUT_LRS, ABOUT_THE_FUTURE
from chronicle.resume.learning_rate import number
from chronicle.resume.memory import LrRow, Memory, ParamGroup
from chronicle.resume.reference import LR, Place

AS_FIRST_PASS = "so it was in the first pass, right before the step that followed this save"
OTHER_LAYERS = "this training trains other layers from time to time"
A_HABIT = "this training changes it between a save and its next step; the launch that saved ended before that step"
SET_BY_SCRIPT = "restored, and then set by the script itself to a value that this training has not used before"
SET_AFTER_RELOAD = "a reload in this process: restored, and then set by the script itself"
GOES_ON_HERE = "a reload in this process: the loop and its data go on from where they were"
OWN_MODE = "the optimizer's own mode: it is switched by `optimizer.train()` and `optimizer.eval()`"
REPLACED = "the optimizer replaces the weights when its mode changes (`optimizer.train()`), so they are not those of the save"
SPLIT = ("accumulation", "micro batch", "batch size", "global batch")
# What a habit excuses: never an LR, a count or a position, which a lost state would change as well.
HABITS = ("frozen parameters", "training mode", "parameter groups", *SPLIT)
GOES_ON = ("step", "data position", "next batch", "batches of the rollback")
OF_LR = ("learning rate per group", "learning rates of the next steps")
OF_WEIGHTS = ("weights", "buffers")  # what an evaluation depends on, beside the files

SAME = 1e-6  # relative
NUM_RECENT = 2  # different values
LEAST_RECENT = 4  # steps from which a line or a range is known
LEAST_TURNS = 3
ON_LINE = 1e-3  # relative: of one step to the next
SMALL_STEP = 0.05  # relative: of an option that moves
HIGHER = 1.5  # than any LR before


class Kind(StrEnum):
    """The five."""

    FIRST_PASS = "as in the first pass"
    LONGER = "longer schedule"
    ACCEPTED = "accepted by name"
    ROUNDED = "rounded"
    CARRIED_ON = "carried on in one process"


class Allowance(NamedTuple):
    """Why a difference is no reason to refuse. Not `is_known`: the values cannot be compared, and that is all that is said."""

    kind: Kind
    why: str
    is_known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known right before the first step, beside the differences themselves."""

    expected: Expectation
    memory: Memory  # of the save
    found: Memory
    is_seen: bool = False  # the step that followed the save was taken
    as_first: frozenset[Place] = frozenset()  # what is as it was there
    is_reload: bool = False  # the state was loaded in a process that had trained before
    longer: Check | None = None  # the note about a longer schedule
    unknown_schedule: str = ""  # why nobody can say whether it is longer
    half: str = ""  # the precision to which all weights are rounded
    moved: Allowance | None = None  # why weights that were as saved are not so any more
    own_modes: frozenset[str] = frozenset()  # flags of optimizers that have a mode of their own
    options: Mapping[str, tuple[LrRow, LrRow]] = field(default_factory=dict)  # before and right after the load, by name
    last_rollback: Contract | None = None  # of the run, also a past one


def allow(checks: Sequence[Check], facts: Facts) -> list[Check]:
    """The checks; a difference that is allowed is noted, or said to be not compared."""
    out = []
    for check in checks:
        found = None if check.ok else allowance(check, facts)
        if found is None:
            out.append(check)
        elif not found.is_known:
            out.append(not_compared(check.name, check.code, found.why, where=check.where))
        elif found.kind is Kind.LONGER and facts.longer is not None:
            out.append(facts.longer)
        else:
            out.append(replace(check, outcome=Outcome.NOTED, cause=_words(check, found.why)))
    return list(dict.fromkeys(out))


def allowance(check: Check, facts: Facts) -> Allowance | None:
    """Why this difference is allowed; None where it is not."""
    for excuse in (_is_longer, _is_set_by_hand, _is_of_weights, _is_as_in_first_pass, _is_carried_on):
        if found := excuse(check, facts):
            return found
    return None


def leave_open(checks: Sequence[Check]) -> list[Check]:
    """The checks when the guard failed to judge them: what might have been allowed is not compared, so nothing is refused."""
    why = "the guard failed to find out whether this difference is allowed"
    open_ones = (*ABOUT_LRS, *GOES_ON)
    return [
        not_compared(check.name, check.code, why, where=check.where) if not check.ok and check.name in open_ones else check
        for check in checks
    ]


def _words(check: Check, why: str) -> str:
    if why not in (AS_FIRST_PASS, OTHER_LAYERS, A_HABIT):
        return why
    if check.name == "weights":
        return f"moved after the load, before the first step: {why}"
    return f"{check.expected or 'as saved'} → {check.found}: {why}"


def _is_longer(check: Check, facts: Facts) -> Allowance | None:
    if check.name not in ABOUT_THE_FUTURE:
        return None
    if facts.unknown_schedule:
        why = f"the schedulers could not be described ({facts.unknown_schedule}): whether the schedule was only made longer"
        return Allowance(Kind.LONGER, f"{why} is not known", False)
    return Allowance(Kind.LONGER, facts.longer.cause) if facts.longer else None


def _is_of_weights(check: Check, facts: Facts) -> Allowance | None:
    if check.name == "weights" and facts.own_modes:
        return Allowance(Kind.FIRST_PASS, REPLACED, False)
    if check.name == "weights" and facts.moved is not None:
        return facts.moved
    if check.name in OF_WEIGHTS and facts.half:
        why = f"they are rounded to {facts.half}, so the script saved them in it, and memory at the save was more exact"
        return Allowance(Kind.ROUNDED, why, False)
    return None


def _is_as_in_first_pass(check: Check, facts: Facts) -> Allowance | None:
    if facts.expected.contract is not None:
        return None  # another state was promised than the one that was saved
    if check.name == "frozen parameters" and _is_in_turn(facts.memory.seen_frozen, facts.found.frozen):
        return Allowance(Kind.FIRST_PASS, OTHER_LAYERS)
    if (check.name, check.where) in facts.as_first:
        return Allowance(Kind.FIRST_PASS, AS_FIRST_PASS)
    if not facts.is_seen and check.name in HABITS and check.name in facts.memory.habits:
        return Allowance(Kind.FIRST_PASS, A_HABIT)
    return None


def _is_in_turn(seen: Sequence[str], now: str) -> bool:
    """Whether a training trains its layers in turn: they changed, and these are as many, new ones, or came back before.

    Layers that were freed once and are frozen again after a resume are those of its beginning: that stays refused.
    """
    if len(seen) < 2:
        return False
    as_many = len({one.partition(" (")[0] for one in (*seen, now)}) == 1
    return as_many or len(set(seen)) < len(seen) or now not in seen


def _is_carried_on(check: Check, facts: Facts) -> Allowance | None:
    """In a process that trained before the load, the loop's counter and its data go on: no sample is repeated or left out."""
    return Allowance(Kind.CARRIED_ON, GOES_ON_HERE) if facts.is_reload and check.name in GOES_ON else None


# ---- options that the script sets by hand ------------------------------------------------------------------------------


def _is_set_by_hand(check: Check, facts: Facts) -> Allowance | None:
    expected, memory, found = facts.expected, facts.memory, facts.found
    if expected.contract is not None or len(memory.groups) != len(found.groups):
        return None
    if check.name in facts.own_modes:
        return Allowance(Kind.FIRST_PASS, OWN_MODE)
    name = LR if check.name in OF_LR else check.name
    saved, now = row_of(name, memory.groups), row_of(name, found.groups)
    built, read = facts.options.get(name, ((), ()))
    was_restored = len(read) == len(saved) and all(_same(a, b) for a, b in zip(saved, read, strict=True))
    if facts.is_reload and name == LR and was_restored and all(new is not None and 0 < new < math.inf for new in now):
        return Allowance(Kind.CARRIED_ON, SET_AFTER_RELOAD)
    if not read and name == LR and expected.lr_set_by_hand:  # the trainer loads by itself: nobody saw the load
        built, read = (None,) * len(saved), saved
    changed = [index for index, old in enumerate(saved) if not _same(old, now[index])]
    if not changed or len(read) != len(saved) or not all(_same(saved[index], read[index]) for index in changed):
        return None
    past = [row for row in memory.used.get(name, ()) if len(row) == len(saved)]
    recent = [row for row in memory.recent_lrs if len(row) == len(saved)] if name == LR else []
    limits = _limits(name, facts, has_moved=len({tuple(row) for row in (*past, *recent)}) > 1)
    if limits is None:
        return None
    if all(_follows([row[index] for row in recent], now[index]) for index in changed):
        return Allowance(Kind.FIRST_PASS, SET_BY_SCRIPT)
    for index in changed:
        others = [value for place, value in enumerate(saved) if place != index and not _same(value, saved[index])]
        earlier = [row[index] for row in (*past, *recent)]
        if not _is_new(now[index], saved[index], earlier, (built[index], *others), *limits):
            return None
    return Allowance(Kind.FIRST_PASS, SET_BY_SCRIPT)


def _limits(name: str, facts: Facts, *, has_moved: bool) -> tuple[float, float, float] | None:
    """How many times the highest value before an option may be, the largest factor to the saved one, and the factor of the
    run's last rollback. None where no script sets it."""
    memory, found, expected = facts.memory, facts.found, facts.expected
    if name != LR:
        # a script's argument must not silently overrule the checkpoint
        return (math.inf, math.inf, 1.0) if has_moved else None
    is_unknown = "next_lrs" in memory.unknown or "next_lrs" in found.unknown
    if memory.schedulers and not is_unknown and memory.lr_source != "manual":
        return None  # a scheduler sets it
    usual = max(HIGHER, expected.allowed_jump())
    moves = sum(a != b for a, b in pairwise(memory.recent_lrs))
    # one that moved at most steps is a function of the step, and has no reason to jump
    jump = usual if moves * 2 >= max(1, len(memory.recent_lrs) - 1) else math.inf
    limit = math.inf if is_unknown else min(jump, usual) if has_moved else 1.0
    ratio = facts.last_rollback.lr_ratio if facts.last_rollback is not None else None
    return limit, jump, ratio or 1.0


def _is_new(
    new: float | None,
    old: float | None,
    past: Sequence[float | None],
    foreign: Sequence[float | None],
    limit: float,
    jump: float,
    ratio: float,
) -> bool:
    """Whether one group's value is the script's own. `foreign`: the constructor's, and other groups'."""
    if old is None or new is None or not math.isfinite(new) or new <= 0 or undoes(ratio, old, new):
        return False
    earlier = [value for value in past if not _same(value, old)]
    if earlier and is_close(new, old, SMALL_STEP):
        return True  # it goes on to move
    higher = [value for value in earlier if value is not None and value > old]  # a falling rate may meet one of its warm-up
    if any(_same(new, value) for value in (*foreign, *earlier[:1], *earlier[-NUM_RECENT:], *higher)):
        return False
    is_low_enough = math.isinf(limit) or new <= limit * max((old, *higher))
    return is_low_enough and (old <= 0 or max(new / old, old / new) <= jump)


def undoes(ratio: float, old: float, new: float) -> bool:
    """Whether this is the LR from before the run's last rollback, which multiplied it by `ratio`."""
    return ratio != 1 and is_close(new * ratio, old, 0.05)


def _follows(values: Sequence[float | None], new: float | None) -> bool:
    """Whether a number is the next of those of the last steps: on their line, or in the range in which they go up and down."""
    known = [value for value in values if value is not None]
    if new is None or not math.isfinite(new) or new <= 0 or len(known) < max(LEAST_RECENT, len(values)):
        return False
    steps = [b - a for a, b in pairwise(known)]
    turns = sum(a * b < 0 for a, b in pairwise([step for step in steps if step]))
    if turns * 4 >= len(steps) and turns >= LEAST_TURNS:
        return min(known) <= new <= max(known)
    *_, before, last_but_one, last = steps
    on_line = [math.isclose(step, before, rel_tol=ON_LINE) for step in (last_but_one, last, new - known[-1])]
    return bool(before) and all(on_line)


def row_of(name: str, groups: Sequence[ParamGroup]) -> LrRow:
    """One option of all groups; None where it is no number."""
    values = (group.lr if name == LR else options_of(group).get(name) for group in groups)
    return tuple(None if isinstance(value, bool | str | list) else number(value) for value in values)


def _same(a: float | None, b: float | None) -> bool:
    return a is b or (a is not None and b is not None and is_close(a, b, SAME))
