"""The first steps after a resume: the LR that is really used against the LR that was forecast (L1). Pure folds.

`LrWitness` tells during training whether forecasts come true at all: in a script that sets `group["lr"]` by hand before
each step they do not, and there the forecast is no reason to refuse; only a jump is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chronicle.resume.checks.comparing import other_world
from chronicle.resume.contract import Expectation
from chronicle.resume.memory import Memory
from chronicle.resume.checks.check import Check

__all__ = ["NUM_TRIPWIRE_STEPS", "LrTripwire", "LrWitness"]

NUM_TRIPWIRE_STEPS = 50
NUM_CONFIRM = 3  # changed LRs forecast right before a schedule counts as known

Row = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LrWitness:
    """Folds the LRs really used against the last forecast; `source` is its opinion."""

    rows: tuple[Row, ...] = ()
    position: int = 0
    num_right: int = 0
    num_wrong: int = 0

    @property
    def source(self) -> str:
        """scheduler (forecasts came true), manual (they did not), untested (too few steps seen)."""
        if self.num_wrong:
            return "manual"
        return "scheduler" if self.num_right >= NUM_CONFIRM else "untested"

    def predict(self, rows: Sequence[Row]) -> "LrWitness":
        """Start comparing with a new forecast, made now."""
        return replace(self, rows=tuple(rows), position=0)

    def see(self, lrs: Row) -> "LrWitness":
        """One optimizer step with these LRs."""
        if self.position >= len(self.rows):
            return self
        right = _same(self.rows[self.position], lrs)
        return replace(
            self,
            position=self.position + 1,
            num_right=self.num_right + right,
            num_wrong=self.num_wrong + (not right),
        )


@dataclass(slots=True, kw_only=True)
class LrTripwire:
    """L1 over the first steps: feed the LRs of each step, get a failed check or None."""

    rows: tuple[Row, ...]
    source: str
    position: int = 0

    @classmethod
    def after(cls, expectation: Expectation, found: Memory, own: Sequence[Row] | None) -> "LrTripwire":
        """Rows promised at save first, continued by this launch's own forecast."""
        # a warm-up after a rollback, and the speed of a schedule on another number of ranks, are this launch's own:
        # the promised rows do not know them, its forecast does
        is_own = expectation.warms_up or other_world(expectation, found)
        promised = () if is_own else expectation.next_lrs() or ()
        rows = (*promised, *(own or ())[len(promised) :])
        source = expectation.memory.lr_source if expectation.memory else "untested"
        return cls(rows=tuple(rows), source=source)

    @property
    def done(self) -> bool:
        """Whether all forecast steps have been seen."""
        return self.position >= len(self.rows)

    def feed(self, lrs: Row) -> Check | None:
        """Compare the LRs of the next optimizer step."""
        if self.done:
            return None
        row, index = self.rows[self.position], self.position
        self.position += 1
        if _same(row, lrs) or self.source != "scheduler":
            return None  # a jump of a hand-set LR is the first-step check's business
        return Check(
            name="learning rate in use",
            code="L1",
            ok=False,
            expected=", ".join(f"{lr:.9g}" for lr in row),
            found=", ".join(f"{lr:.9g}" for lr in lrs),
            where=f"step {index + 1} of this launch",
            cause=_cause(row, lrs),
        )


def _same(a: Row, b: Row) -> bool:
    return len(a) == len(b) and all(abs(x - y) <= 1e-6 * max(abs(x), abs(y)) for x, y in zip(a, b, strict=True))


def _cause(expected: Row, found: Row) -> str:
    if all(f < e for e, f in zip(expected, found, strict=False)):
        return "LR below the plan: a schedule that starts again, or that is driven by a counter that was not restored"
    return "LR off the plan: something other than the restored scheduler sets it"
