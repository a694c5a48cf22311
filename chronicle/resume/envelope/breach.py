"""A breach of the flight envelope: its kinds and tiers, and how one is told: an incident, and a line with what to type."""

from dataclasses import dataclass
from enum import StrEnum

from chronicle.resume.events import Saved
from chronicle.resume.hub import Observer
from chronicle.resume.training import Training

NUM_KEPT = 64


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


class BreachLog(Observer):
    """Tells each kind of breach once. It knows the saves of this launch that nothing spoilt: those to go back to."""

    about = "way out"

    def __init__(self, training: Training) -> None:
        self._training = training
        self.told: dict[BreachKind, Breach] = {}
        self.saved_steps: list[int] = []  # of this launch, newest last

    def saved(self, event: Saved) -> None:
        """A sound checkpoint is one to go back to."""
        memory = event.memory
        if memory is not None and not memory.spoilt and memory.step is not None:
            self.saved_steps = [*self.saved_steps[1 - NUM_KEPT :], memory.step]

    def tell(
        self, kind: BreachKind, words: str, *, step: int | None, low: int | None = None, seen: int | None = None
    ) -> Breach:
        """Write the incident and print the line, once for each kind; returns what was told.

        `step`: where it began, `seen` (by default there, too) where it was seen; `low`: where it still was well.
        """
        if kind not in self.told:
            low = low if step is not None and low is not None and low < step else None
            breach = self.told[kind] = Breach(kind=kind, step=step, words=words, seen=step if seen is None else seen, low=low)
            self._training.journal.tell(
                kind.value,
                words,
                step=step,
                tier=breach.tier,
                low=step if low is None else low + 1,
                seen=breach.seen,
                since=f" {breach.since}",
                more=self._way_out(breach),
            )
        return self.told[kind]

    def spoils(self) -> str:
        """What spoils a checkpoint saved now, in words; "" when nothing does."""
        return "; ".join(f"{b.kind.value} {b.since}: {b.words}" for b in self.told.values() if b.kind in SPOILT)

    def healed(self) -> None:
        """Another state was loaded: the next one that is spoilt is told again."""
        for kind in SPOILT:
            self.told.pop(kind, None)

    def _way_out(self, breach: Breach) -> str:
        """The line to type where the weights are spoilt; "" for none."""
        paths, start = self._training.journal.paths, self._training.start
        if breach.tier != "propose" or paths is None:
            return ""
        sound = self._newest_before(breach)
        if sound is None and start.resumed:
            sound = start.start_step or 0
        if sound is None:
            return f"no sound checkpoint of this launch is known; type: chronicle watch --once --run {paths.run}"
        return f"to roll back, type: chronicle rollback --to {sound} --run {paths.run}"

    def _newest_before(self, breach: Breach) -> int | None:
        """The newest save before the breach: where it was last well, or the step before it began."""
        last = breach.low
        if last is None and breach.step is not None:
            last = breach.step - 1
        if last is None:
            return None
        return next((step for step in reversed(self.saved_steps) if step <= last), None)
