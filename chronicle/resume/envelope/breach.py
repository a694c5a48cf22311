"""A breach of the flight envelope: its kinds and tiers, and how one is told: a journal incident and a line on stderr."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from chronicle.resume.journal import GuardJournal


class BreachKind(StrEnum):
    """What stopped being true; the name of the incident."""

    POISONED = "weights-not-finite"
    REPLICAS = "replicas-differ"
    GRADIENTS = "gradients-not-finite"
    STUCK = "parameters-do-not-move"
    ORPHANS = "optimizer-on-other-parameters"
    NOT_ZEROED = "gradients-not-zeroed"
    ACCUMULATION = "accumulation-not-done"
    CLIPPING = "clipping-not-done"
    LR = "lr-not-the-schedulers"
    UPDATE = "update-not-as-recorded"
    UNTIED = "weights-not-tied"
    MODE = "mode-changed"
    DTYPE = "dtype-changed"


# A checkpoint saved in this state is spoilt: it is marked, and no rollback goes to it.
SPOILT = frozenset((BreachKind.POISONED, BreachKind.REPLICAS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """One thing that stopped being true, the optimizer step at which it began (None: not known), and what was seen."""

    kind: BreachKind
    step: int | None
    words: str
    seen: int | None = None  # the step at which it was seen
    low: int | None = None  # the last step at which it was known to be well

    @property
    def tier(self) -> str:
        """`propose` where the weights are spoilt, else `warn`."""
        return "propose" if self.kind in SPOILT else "warn"

    @property
    def since(self) -> str:
        """Where it began, in words."""
        if self.step is None:
            return "at an unknown step"
        early = self.low is not None and self.low + 1 < self.step
        return f"since step {self.step}" + (f" (at the earliest {(self.low or 0) + 1})" if early else "")


class BreachLog:
    """Tells each kind of breach once. `way_out(breach)` gives the line to type, "" for none."""

    def __init__(self, journal: GuardJournal, way_out: Callable[[Breach], str]) -> None:
        self._journal, self._way_out = journal, way_out
        self.told: dict[BreachKind, Breach] = {}

    def tell(self, breach: Breach) -> bool:
        """Write the incident and print the line; False when this kind was told before."""
        if breach.kind in self.told:
            return False
        self.told[breach.kind] = breach
        self._journal.tell(
            breach.kind.value,
            breach.words,
            step=breach.step,
            tier=breach.tier,
            low=breach.step if breach.low is None else breach.low + 1,
            seen=breach.seen,
            since=f" {breach.since}",
            more=self._way_out(breach),
        )
        return True

    def spoils(self) -> str:
        """What spoils a checkpoint saved now, in words; "" when nothing does."""
        return "; ".join(f"{b.kind.value} {b.since}: {b.words}" for b in self.told.values() if b.kind in SPOILT)

    def healed(self, kind: BreachKind) -> None:
        """It is over (a reload): the next one is told again."""
        self.told.pop(kind, None)
