"""The first steps after a resume (L1 to L4): the LR in use against its forecast, and the log of an unguarded trainer. Pure.

`LrTripwire` sees each optimizer step of a guarded run. `LrWitness` finds out during training whether forecasts come true at
all: a script that sets `group["lr"]` by hand before each step makes them wrong, and then only a jump is refused.
`check_log` judges logged rows alone, for trainers without the guard. It sees damage that has already begun. Its thresholds
are relative to the run's own last steps, and a curve too short to show its noise is not judged.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from chronicle.resume.checks.check import Check, failed, noted
from chronicle.resume.checks.memory import accepted_world
from chronicle.resume.contract import Expectation
from chronicle.resume.learning_rate import NUM_FORECAST
from chronicle.resume.memory import LrRow, Memory
from chronicle.resume.rules import show_row
from rollback.channels import Role, canonical_of, value_of

NUM_TRIPWIRE_STEPS = 50
NUM_CONFIRM = 3  # correct forecasts after which a schedule counts as known

NUM_BEFORE = 50  # logged rows before and after a restart that are compared
NUM_AFTER = 50
LEAST_BEFORE = 8  # losses below which nothing is judged
LEAST_AFTER = 5
FAR = 8.0  # robust standard deviations
NORMAL_MAD = 1.4826
ROUNDING = 1e-6
LR_JUMP = 1.5  # factor between neighbouring logged LRs that no schedule of a healthy resume makes

LoggedRow = tuple[int, Mapping[str, float]]  # step, values


@dataclass(frozen=True, slots=True, kw_only=True)
class LrWitness:
    """Compares the LRs in use with the last forecast; `source` is its conclusion."""

    rows: tuple[LrRow, ...] = ()
    position: int = 0
    num_right: int = 0
    num_wrong: int = 0
    num_moved: int = 0  # of the right ones: the LR was another than the one before

    @property
    def moved(self) -> bool:
        """Whether forecasts of an LR that moves came true. A constant one says nothing about the speed of its scheduler."""
        return self.num_moved >= NUM_CONFIRM

    @property
    def source(self) -> str:
        """scheduler (forecasts came true), manual (they did not), untested (too few steps seen)."""
        if self.num_wrong:
            return "manual"
        return "scheduler" if self.num_right >= NUM_CONFIRM else "untested"

    def predict(self, rows: Sequence[LrRow]) -> "LrWitness":
        """Start comparing with a new forecast, made now."""
        return replace(self, rows=tuple(rows), position=0)

    def see(self, lrs: LrRow) -> "LrWitness":
        """One optimizer step with these LRs."""
        if self.position >= len(self.rows):
            return self
        right = _same(self.rows[self.position], lrs)
        moved = right and self.position > 0 and not _same(self.rows[self.position - 1], lrs)
        return replace(
            self,
            position=self.position + 1,
            num_right=self.num_right + right,
            num_wrong=self.num_wrong + (not right),
            num_moved=self.num_moved + moved,
        )


@dataclass(slots=True, kw_only=True)
class LrTripwire:
    """L1 over the first steps: `feed` the LRs of each step and get a failed check or None.

    Only a `source` of "scheduler" can fail: elsewhere the script sets its LR, and the first-step check has judged a jump. An LR
    that leaves its forecast fails if it jumps, or if it lies on the forecast's own curve, at another place of it. One that goes
    on smoothly to values that the forecast never takes is another schedule of the script (the warm-up ended, and a second
    scheduler drives on): it is noted. Where only a constant LR was seen (`moved` False), nobody knows how often this
    scheduler is stepped, so only a jump fails.
    After an LR edit that was accepted without proof the LR is held: `held` is the largest factor between two steps.
    """

    rows: tuple[LrRow, ...]
    source: str
    position: int = 0
    held: float | None = None
    moved: bool = True
    last: LrRow | None = None  # of the step before

    @classmethod
    def after(
        cls, expectation: Expectation, found: Memory, own: Sequence[LrRow] | None, *, longer: bool = False
    ) -> "LrTripwire":
        """The rows promised at the save, continued by this launch's `own` forecast. `longer`: the schedule was extended."""
        # a warm-up after a rollback and another number of ranks change the LR: the own forecast knows both, the
        # rows of the save do not
        is_own = longer or expectation.warms_up or accepted_world(expectation, found)
        promised = () if is_own else expectation.next_lrs() or ()
        rows = (*promised, *(own or ())[len(promised) :])
        memory, contract = expectation.memory, expectation.contract
        # no plan of the next steps: a constant LR without a scheduler, and a scheduler that is stepped at the end of an epoch
        by_steps = memory is not None and bool(memory.schedulers) and all(one.unit for one in memory.schedulers)
        source = memory.lr_source if memory is not None and by_steps else "untested"
        if contract is not None and contract.lr_unproved and contract.lrs and not expectation.warms_up:
            return cls(rows=(contract.lrs,) * NUM_TRIPWIRE_STEPS, source=source, held=expectation.allowed_jump())
        return cls(rows=tuple(rows), source=source, moved=memory is None or memory.lr_moved)

    @property
    def done(self) -> bool:
        """Whether all forecast steps have been seen."""
        return self.position >= len(self.rows)

    def feed(self, lrs: LrRow) -> Check | None:
        """Compare the LRs of the next optimizer step."""
        if self.done:
            return None
        row, index = self.rows[self.position], self.position
        self.position += 1
        if self.held is not None:
            return self._hold(row, lrs, index)
        before, self.last = self.last or row, lrs
        if _same(row, lrs) or self.source != "scheduler":
            return None
        words = {"expected": show_row(row), "found": show_row(lrs), "where": f"step {index + 1} of this launch"}
        if not _near(before, lrs, LR_JUMP) or _vanishes(before, row, lrs) or (self.moved and self._is_on_curve(lrs)):
            return failed("learning rate in use", "L1", **words, cause=_cause(row, lrs))
        self.position = len(self.rows)
        if _same(before, lrs):
            return None  # it stays as it was: the scheduler is stepped less often than once an optimizer step
        cause = f"{words['found']} in use at {words['where']}, {words['expected']} foretold: another schedule goes on from here"
        return noted("learning rate in use", "L1", **words, cause=cause)

    def _is_on_curve(self, lrs: LrRow) -> bool:
        """Whether every LR lies between the smallest and the largest that are foretold."""
        columns = list(zip(*(row for row in self.rows if len(row) == len(lrs)), strict=True))
        known = [[value for value in column if value is not None] for column in columns]
        return len(known) == len(lrs) and all(
            lr is None or not values or min(values) * (1 - ROUNDING) <= lr <= max(values) * (1 + ROUNDING)
            for values, lr in zip(known, lrs, strict=True)
        )

    def _hold(self, row: LrRow, lrs: LrRow, index: int) -> Check | None:
        assert self.held is not None
        if _near(row, lrs, self.held):
            self.rows = (lrs,) * len(self.rows)
            return None
        return failed(
            "learning rate in use",
            "L1",
            expected=f"within a factor {self.held:.4g} of {show_row(row)}",
            found=show_row(lrs),
            where=f"step {index + 1} of this launch",
            cause="the LR edit of the rollback was accepted without proof, and something else sets the LR",
        )


class LrWatch:
    """The LRs of one process: whether forecasts of them come true, and the fifty steps after a first one."""

    def __init__(self) -> None:
        self.recent: deque[LrRow] = deque(maxlen=NUM_FORECAST)  # of the last optimizer steps
        self.witness = LrWitness()
        self.tripwire: LrTripwire | None = None
        self._knows_schedulers = False

    @property
    def last(self) -> LrRow | None:
        """LRs of the last step; None where none was taken."""
        return self.recent[-1] if self.recent else None

    def begins(self) -> None:
        """The next optimizer step is a first one: what was foretold before it no longer holds."""
        self.recent.clear()
        self.witness, self.tripwire = self.witness.predict(()), None

    def arm(self, tripwire: LrTripwire | None) -> None:
        """From the next step on the LRs are held to this; None: to nothing."""
        self.tripwire = tripwire

    def knows(self, schedulers: Sequence[object]) -> None:
        """Forecasts that were made without the schedulers of now (Fabric names them at its first save) prove nothing."""
        if schedulers and not self._knows_schedulers:
            self._knows_schedulers, self.witness = True, LrWitness()

    def foretell(self, rows: Sequence[LrRow] | None) -> None:
        """The LRs of the next steps, as far as they can be forecast."""
        if rows is not None:
            self.witness = self.witness.predict(rows)

    def see(self, lrs: LrRow) -> Check | None:
        """The LRs of one optimizer step; a failed or noted check where they are not those that were promised."""
        self.recent.append(lrs)
        self.witness = self.witness.see(lrs)
        if self.tripwire is None:
            return None
        check = self.tripwire.feed(lrs)
        if self.tripwire.done:
            self.tripwire = None
        return check


def _near(a: LrRow, b: LrRow, factor: float) -> bool:
    """Whether no LR differs by more than the factor; at zero (the start of a warm-up) nothing is compared."""
    return len(a) == len(b) and all(
        x is y if x is None or y is None else x <= 0 or y <= 0 or max(x, y) <= factor * min(x, y)
        for x, y in zip(a, b, strict=True)
    )


def _vanishes(before: LrRow, foretold: LrRow, lrs: LrRow) -> bool:
    """Whether a group that had an LR, and was to have one, has none now, while another group goes on."""
    gone = [bool(b and f) and lr == 0 for b, f, lr in zip(before, foretold, lrs, strict=False)]
    return any(gone) and any(lrs)


def _same(a: LrRow, b: LrRow) -> bool:
    return len(a) == len(b) and all(
        x is y if x is None or y is None else abs(x - y) <= 1e-6 * max(abs(x), abs(y)) for x, y in zip(a, b, strict=True)
    )


def _cause(expected: LrRow, found: LrRow) -> str:
    if all(e is not None and f is not None and f < e for e, f in zip(expected, found, strict=False)):
        return "the LR is below the forecast: the schedule started again, or its counter was not restored"
    return "the LR differs from the forecast: something other than the restored scheduler sets it"


# ---- from the per-step log alone: step, LR and loss of a restart -----------------------------------------------------
def logged_row(step: int, values: Mapping[str, float]) -> LoggedRow | None:
    """LR and loss of one logged step; None when it has neither."""
    row = {}
    for role in (Role.LR, Role.LOSS):
        value = value_of(values, role)
        if value is not None and math.isfinite(value):
            row[canonical_of(role)] = value
    return (step, row) if row else None


def check_log(
    before: Sequence[LoggedRow], after: Sequence[LoggedRow], *, resume_step: int, lr_ratio: float = 1.0, warm_until: int = 0
) -> list[Check]:
    """Failed checks only. `before`: rows up to the checkpoint; `after`: the new launch's rows; `lr_ratio`: the rollback's.

    Up to step `warm_until` the rollback asked for a warm-up, so the LR is not judged there.
    """
    earlier = [row for row in before if row[0] <= resume_step][-NUM_BEFORE:]
    later = list(after)[:NUM_AFTER]
    if not later:
        return []
    warm = [row for row in later if row[0] > warm_until]
    checks = [*_step(later, resume_step), *_lr(earlier, warm, lr_ratio)]
    return checks + _loss(earlier, later)


def _step(later: Sequence[LoggedRow], resume_step: int) -> list[Check]:
    spacing = min((b[0] - a[0] for a, b in pairwise(later) if b[0] > a[0]), default=1)
    first = later[0][0]
    if resume_step < first <= resume_step + spacing:
        return []
    cause = (
        "the step counter was not restored"
        if first <= 1 + spacing
        else "another checkpoint was loaded, or steps were skipped"
    )
    return [
        failed("first logged step", "L2", expected=f"{resume_step + 1}", found=f"{first}", where="log", cause=cause)
    ]


def _lr(earlier: Sequence[LoggedRow], later: Sequence[LoggedRow], ratio: float) -> list[Check]:
    old = [values["lr"] for _, values in earlier if "lr" in values]
    new = [values["lr"] for _, values in later if "lr" in values]
    if not old or not new:
        return []
    steady = max((max(a, b) / min(a, b) for a, b in pairwise(old) if min(a, b) > 0), default=1.0)
    limit = max(LR_JUMP, steady**2)
    # the rollback's own factor: an LR nearer to the old one than to the promised one was not changed
    first_limit = limit if ratio == 1.0 else max(steady**2, min(LR_JUMP, math.sqrt(max(ratio, 1 / ratio))))
    curve = [old[-1] * ratio, *new]
    for index, (last, now) in enumerate(pairwise(curve)):
        bound = first_limit if index == 0 else limit
        fell = now * bound < last
        # a schedule may fall in steps; one that falls and then rises has started again (seed exp9)
        if fell and max(curve[index + 1 :]) > now:
            cause = "the LR is far below its last value and rises: the schedule started again"
        elif index == 0 and (fell or last * bound < now):
            cause = "the LR was not restored, or the script set it again"
        elif index and ratio != 1.0 and _goes_back(last, now, ratio, steady):
            cause = "the LR went back by the factor of the rollback: the scheduler was not loaded, or the script set it again"
        else:
            continue
        return [
            failed(
                "logged learning rate", "L1", expected=f"about {last:.6g}", found=f"{now:.6g}", where="log", cause=cause
            )
        ]
    return []


def _goes_back(last: float, now: float, ratio: float, steady: float) -> bool:
    """Whether an LR jumps by what the rollback took away, give or take twice the schedule's own largest step.

    Where the schedule itself moves nearly as far in one step, nothing is said.
    """
    drift = 1.02 * steady**2
    if min(last, now) <= 0 or drift**2 >= max(ratio, 1 / ratio):
        return False
    return 1 / drift <= now * ratio / last <= drift


def _loss(earlier: Sequence[LoggedRow], later: Sequence[LoggedRow]) -> list[Check]:
    old = [values["loss"] for _, values in earlier if "loss" in values]
    new = [values["loss"] for _, values in later if "loss" in values]
    if len(old) < LEAST_BEFORE or len(new) < LEAST_AFTER:
        return []
    # noise as differences of neighbours, so that a falling curve adds none
    steps = [abs(b - a) for a, b in pairwise(old)]
    last_digit = min((step for step in steps if step), default=0.0)  # of a loss that is printed with few digits
    scale = max(NORMAL_MAD * max(median(steps), last_digit) / 2**0.5, 1e-9 * abs(median(old)))
    centre, found = median(old[-LEAST_BEFORE:]), median(new[:LEAST_AFTER])
    if abs(found - centre) <= FAR * scale:
        return []
    high = found > centre
    cause = "state was lost: weights, moments or precision" if high else "the loss is too low: data may be repeated"
    code, name = "L3" if high else "L4", "loss after the resume"
    return [
        failed(name, code, expected=f"{centre:.6g} ± {FAR * scale:.2g}", found=f"{found:.6g}", where="log", cause=cause)
    ]
