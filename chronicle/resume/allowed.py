"""What a difference from the save may be excused by: five allowances, and nothing else. Pure.

*As in the first pass*: so it was right before the step that followed this save; where that step was never taken, what this
training is known to do by itself. *A longer schedule*: one number of it grew, and no LR ahead is lower. *Accepted by name*: a
person said so (`rules.judge`). *Rounded*: the script saved in half precision. *Carried on in one process*: after a reload the
loop goes on from where it was.

Options that a script sets by hand (an LR that is annealed, a momentum that is warmed up) are the most frequent accident of a
resume too. Where the next step of the first pass does not tell them apart, one is the script's own that was *restored*, so that
something set it after the load, and that no lost state gives: an option but the LR must have moved in this training before. An
LR is not the constructor's nor another group's, and goes on from where it was.
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
SET_BY_SCRIPT = "restored, and then set by the script itself to a value that goes on from there"
SET_AFTER_RELOAD = "a reload in this process: restored, and then set by the script itself"
GOES_ON_HERE = "a reload in this process: the loop and its data go on from where they were"
OWN_MODE = "the optimizer's own mode: it is switched by `optimizer.train()` and `optimizer.eval()`"
REPLACED = "the optimizer replaces the weights when its mode changes (`optimizer.train()`), so they are not those of the save"
SPLIT = ("accumulation", "micro batch", "batch size", "global batch")
# What a habit excuses: never an LR, a count or a position, which a lost state would change as well.
HABITS = ("frozen parameters", "training mode", "parameter groups", "weights", *SPLIT)
GOES_ON = ("step", "data position", "next batch", "batches of the rollback")
OF_LR = ("learning rate per group", "learning rates of the next steps")
OF_WEIGHTS = ("weights", "buffers")  # what an evaluation depends on, beside the files

SAME = 1e-6  # relative
HIGHER = 1.5  # than the LR before


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
        return Allowance(Kind.FIRST_PASS, A_HABIT, check.name != "weights")
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
    has_moved = name in memory.moved_options
    if name != LR:  # a script's argument must not silently overrule the checkpoint
        return Allowance(Kind.FIRST_PASS, SET_BY_SCRIPT) if has_moved else None
    is_unknown = "next_lrs" in memory.unknown or "next_lrs" in found.unknown
    if memory.schedulers and not is_unknown and memory.lr_source != "manual":
        return None  # a scheduler sets it
    for index in changed:
        new, old, others = now[index], saved[index], [value for value in saved if not _same(value, saved[index])]
        ratio = facts.last_rollback.lr_ratio if facts.last_rollback is not None else None
        if old is None or new is None or not 0 < new < math.inf or undoes(ratio or 1.0, old, new):
            return None
        most = math.inf if is_unknown else max(HIGHER, expected.allowed_jump()) if has_moved else 1.0
        if not _goes_on(new, old, facts, most, lost=(built[index], *others)):
            return None
    return Allowance(Kind.FIRST_PASS, SET_BY_SCRIPT)


def _goes_on(new: float, old: float, facts: Facts, most: float, lost: Sequence[float | None]) -> bool:
    """Whether one group's LR goes on from where it was, and is at most `most` times as high.

    `lost`: what it would be in a group that was not restored.
    """
    recent = facts.memory.recent_lrs
    if sum(a != b for a, b in pairwise(recent)) * 2 >= max(1, len(recent) - 1):
        usual = max(HIGHER, facts.expected.allowed_jump())
        return old <= 0 or max(new / old, old / new) <= usual  # a function of the step has no reason to jump
    is_older = any(_same(new, value) for row in recent for value in row)
    if is_older or any(_same(new, value) for value in lost):
        return False
    return old <= 0 or new <= most * old


def undoes(ratio: float, old: float, new: float) -> bool:
    """Whether this is the LR from before the run's last rollback, which multiplied it by `ratio`."""
    return ratio != 1 and is_close(new * ratio, old, 0.05)


def row_of(name: str, groups: Sequence[ParamGroup]) -> LrRow:
    """One option of all groups; None where it is no number."""
    values = (group.lr if name == LR else options_of(group).get(name) for group in groups)
    return tuple(None if isinstance(value, bool | str | list) else number(value) for value in values)


def _same(a: float | None, b: float | None) -> bool:
    return a is b or (a is not None and b is not None and is_close(a, b, SAME))
