"""The learning rates in use, at each optimizer step of a guarded run.

`LrWitness` finds out during training whether forecasts come true at all: a script that sets `group["lr"]` by hand before each
step makes them wrong, and then only a jump is refused. `LrTripwire` holds the first fifty steps of a resume to what was
promised (L1).
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chronicle.resume.checks.check import Check, failed, noted
from chronicle.resume.checks.memory import accepted_world
from chronicle.resume.contract import COMPUTED, Expectation, close_rows
from chronicle.resume.envelope.breach import BreachKind, BreachLog
from chronicle.resume.events import BatchEntered, GradientReady, Loaded, StepBegins
from chronicle.resume.honours import Honours
from chronicle.resume.hub import RESTS, Observer, Rest
from chronicle.resume.learning_rate import NUM_FORECAST, BoundScheduler, number
from chronicle.resume.memory import LrRow, Memory
from chronicle.resume.reference import LR, OptionValues
from chronicle.resume.rules import show_row
from chronicle.resume.training import a_batch_entered

NUM_TRIPWIRE_STEPS = 50
LR_JUMP = 1.5  # factor between neighbouring LRs that no schedule of a healthy resume makes
NUM_CONFIRM = 3  # correct forecasts after which a schedule counts as known


def lrs_of(optimizers: Iterable[Any]) -> LrRow:
    """The LR of every group of these optimizers now."""
    found = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            lr = group.get("lr")
            found.append(lr if type(lr) is float else number(lr))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class LrWitness:
    """Compares the LRs in use with the last forecast; `source` is its conclusion."""

    rows: tuple[LrRow, ...] = ()
    position: int = 0
    num_right: int = 0
    num_wrong: int = 0

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
        """One optimizer step with these LRs, which was foretold."""
        right = _same(self.rows[self.position], lrs)
        return replace(
            self,
            position=self.position + 1,
            num_right=self.num_right + right,
            num_wrong=self.num_wrong + (not right),
        )


@dataclass(slots=True, kw_only=True)
class LrTripwire:
    """L1 over the first steps: `feed` the LRs of each step and get a failed check or None.

    Only a `source` of "scheduler" can fail: elsewhere the script sets its LR, and the first-step check has judged a jump. An LR
    that leaves its forecast fails if it jumps. One that goes on smoothly is another schedule of the script, or its scheduler is
    stepped more often than it was: that is noted.
    After an LR edit that was accepted without proof the LR is held: `held` is the largest factor between two steps.
    """

    rows: tuple[LrRow, ...]
    source: str
    position: int = 0
    held: float | None = None
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
        return cls(rows=tuple(rows), source=source)

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
        if not _near(before, lrs, LR_JUMP) or _vanishes(before, row, lrs):
            return failed("learning rate in use", "L1", **words, cause=_cause(row, lrs))
        self.position = len(self.rows)
        if _same(before, lrs):
            return None  # it stays as it was: the scheduler is stepped less often than once an optimizer step
        cause = f"{words['found']} in use at {words['where']}, {words['expected']} foretold: another schedule goes on from here"
        return noted("learning rate in use", "L1", **words, cause=cause)

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


class LrWatch(Observer):
    """The LRs of one process: whether forecasts of them come true, and the fifty steps after a first one.

    All along, an LR that was its schedulers' at every step must stay theirs; a script that sets it by hand as well is not
    accused. `options` keeps the values that were used. `log` hears of an LR that no scheduler set, nor the guard's warm-up.
    """

    about = "learning rate in use"

    def __init__(self, options: OptionValues, honours: Honours, log: BreachLog) -> None:
        self._options, self._honours, self._log = options, honours, log
        self.recent: deque[LrRow] = deque(maxlen=NUM_FORECAST)  # of the last optimizer steps
        self.witness = LrWitness()
        self.tripwire: LrTripwire | None = None
        self._schedulers: tuple[Any, ...] = ()
        self._num_planned = 0  # steps whose LR was the one that the schedulers set last
        self._is_by_hand = False

    def loaded(self, event: Loaded) -> None:
        """The next optimizer step is a first one: what was foretold before it no longer holds."""
        self.recent.clear()
        self.witness, self.tripwire = self.witness.predict(()), None
        self._num_planned, self._is_by_hand = 0, False

    def arm(self, tripwire: LrTripwire | None) -> None:
        """From the next step on the LRs are held to this; None: to nothing."""
        self.tripwire = tripwire

    def knows(self, schedulers: Sequence[BoundScheduler]) -> None:
        """Forecasts that were made without the schedulers of now (Fabric names them at its first save) prove nothing."""
        if schedulers and not self._schedulers:
            self.witness = LrWitness()
        self._schedulers = tuple(bound.scheduler for bound in schedulers)

    def foretell(self, rows: Sequence[LrRow] | None) -> None:
        """The LRs of the next steps, as far as they can be forecast."""
        if rows is not None:
            self.witness = self.witness.predict(rows)

    def batch_entered(self, event: BatchEntered) -> Rest | None:
        """A step that raised has no end: the next batch shows that it is over."""
        return None if a_batch_entered() else RESTS

    def step_begins(self, event: StepBegins) -> Sequence[Check]:
        """The LRs of one optimizer step; a failed or noted check where they are not those that were promised."""
        lrs = event.lrs
        if self.recent and lrs != self.recent[-1]:
            self._options.moved.add(LR)
        self.recent.append(lrs)
        if self.witness.position < len(self.witness.rows):
            self.witness = self.witness.see(lrs)
        check = self.tripwire.feed(lrs) if self.tripwire is not None else None
        if self.tripwire is not None and self.tripwire.done:
            self.tripwire = None
        return () if check is None else (check,)

    def gradient_ready(self, event: GradientReady) -> Rest | None:
        """The update comes next: its LR is the one that the schedulers set last, also where a hook inside the step set it."""
        known = list[Any]()
        for one in self._schedulers:
            known += getattr(one, "_last_lr", None) or ()
        planned = tuple(known)
        if self._is_by_hand or not planned or len(planned) != len(event.lrs):
            return RESTS
        if planned == event.lrs or _same(planned, event.lrs):
            self._num_planned += 1
            return None
        self._is_by_hand = True
        if self._num_planned >= NUM_CONFIRM and self._honours.used_lr is None:
            used, own = next((a, b) for a, b in zip(event.lrs, planned, strict=True) if not _same((a,), (b,)))
            words = f"LR {used:.6g} is used, its scheduler set {own:.6g}"
            self._log.tell(BreachKind.LR, words, step=event.step)
        return RESTS


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
    return close_rows((a,), (b,), COMPUTED)


def _cause(expected: LrRow, found: LrRow) -> str:
    if all(e is not None and f is not None and f < e for e, f in zip(expected, found, strict=False)):
        return "the LR is below the forecast: the schedule started again, or its counter was not restored"
    return "the LR differs from the forecast: something other than the restored scheduler sets it"
