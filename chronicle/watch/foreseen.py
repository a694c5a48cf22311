"""What a try saw of the way that a launch goes: a rise of the loss that came back by itself (`rollback --try`).

The launch takes the same steps from the same checkpoint with the same options, so it will meet the same rise. A rollback is not
proposed for it up to the step to which the try went: there the detector had called it recovered. Then it is, unless it has come
back here, too. A loss that is no number, spoilt weights, and a rise that begins elsewhere are never waited for.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chronicle.journal.entries import Entry
from chronicle.journal.events import RollbackReceipt, Tried, UndoReceipt, events_of
from rollback.detect import Event, Kind

NEAR = 20  # steps between the two onsets
TRY = "chronicle rollback --to "
RISES = frozenset((Kind.INSTANT_SPIKE, Kind.LEVEL_SHIFT, Kind.GRADUAL_DIVERGENCE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """One rise that a try of this way saw: the step it began with, the step by which it had come back.

    `until`: the step to which the try went, and up to which the rise is waited for: a recovery is told some points late.
    """

    onset: int
    back: int
    until: int

    def is_it(self, event: Event) -> bool:
        """Whether an event is this rise."""
        return event.kind in RISES and event.onset_step is not None and abs(event.onset_step - self.onset) <= NEAR

    @property
    def words(self) -> str:
        """What a person reads instead of a proposal."""
        return (
            f"the try of this way rose at step {self.onset}, too, and came back by step {self.back}: "
            f"no rollback is proposed for it before step {self.until}"
        )


def foreseen_rises(entries: Sequence[Entry], launch: int) -> tuple[Foreseen, ...]:
    """The rises of the newest try of the way that the last rollback before this launch took; none where it was not tried."""
    undone = {ref for entry in entries if entry.kind == UndoReceipt.KIND for ref in entry.refs}
    taken: RollbackReceipt | None = None
    for entry in entries:
        if entry.kind == RollbackReceipt.KIND and entry.id not in undone:
            taken = RollbackReceipt.of(entry)
        elif entry.launch is not None and entry.launch >= launch:
            break
    way = None if taken is None else _way_taken(taken)
    trials = [trial for _, trial in events_of(entries, Tried) if way is not None and _way_of(trial) == way]
    if not trials or trials[-1].verdict != "good" or trials[-1].last_step is None:
        return ()
    return tuple(Foreseen(onset=int(onset), back=int(back), until=trials[-1].last_step) for onset, back in trials[-1].rises)


def _way_taken(receipt: RollbackReceipt) -> tuple[Any, ...] | None:
    """The state that a rollback went to, and what it changed; None where that is more than a try can do."""
    ratio, state = receipt.lr_ratio, str(receipt.identity.get("id") or "")
    if not state or receipt.warmup_steps:
        return None
    sets = tuple(sorted((str(name), _number(value)) for name, value in receipt.sets.items()))
    return state, receipt.step, 1.0 if ratio is None else ratio, receipt.skip_batches or 0, receipt.reshuffle, sets


def _way_of(trial: Tried) -> tuple[Any, ...] | None:
    """The same of a try; None of a bisect's trial, and of an option that no receipt tells of."""
    if not trial.change.startswith(TRY):
        return None
    step, *words = shlex.split(trial.change.removeprefix(TRY))
    ratio, skip, reshuffle, sets = 1.0, 0, False, list[tuple[str, str]]()
    while words:
        name = words.pop(0)
        if name == "--reshuffle":
            reshuffle = True
        elif name == "--lr-scale":
            ratio = float(words.pop(0))
        elif name == "--skip-batches":
            skip = int(words.pop(0))
        elif name == "--set":
            key, _, value = words.pop(0).partition("=")
            sets.append((key, str(float(value))))
        else:
            return None
    return trial.state, int(step.partition("@")[0]), ratio, skip, reshuffle, tuple(sorted(sets))


def _number(value: Any) -> str:
    return str(float(value)) if isinstance(value, int | float) else str(value)
