"""Two records of prints, compared rank by rank: the first step that is another one, and in which part of it.

Replays, relaunches and rehearsals all ask this. Parts are looked at in the order in which a step is taken: options, generators,
batch, labels, gradient and its norm, loss, weights. One that only one side has seen is not compared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from chronicle.prints.ring import Print, SeenParts

Steps = Mapping[int, Print]
Prints = Mapping[int, Steps]  # by rank

# field of a print -> what says that it was seen, and its name in words; in the order in which a step is taken
PARTS: Mapping[str, tuple[SeenParts, str]] = {
    "options": (SeenParts.OPTIONS, "LR or options of the optimizer"),
    "torch": (SeenParts.GENERATORS, "torch's generators"),
    "python": (SeenParts.GENERATORS, "Python's generator"),
    "numpy": (SeenParts.GENERATORS, "NumPy's generator"),
    "batch": (SeenParts.BATCH, "batch"),
    "labels": (SeenParts.TARGETS, "labels"),
    "gradient": (SeenParts.GRADIENT, "gradient"),
    "size": (SeenParts.NORM, "logged norm"),
    "loss": (SeenParts.LOSS, "loss"),
    "weights": (SeenParts.WEIGHTS, "weights"),
}
GENERATORS = ("torch", "python", "numpy")
DATA = ("batch", "labels")
RESULT = ("gradient", "size", "loss", "weights")
MOST_TURNS = 4  # of optimizers, with one batch
MOST_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintDifference:
    """The first step that is another one: which parts of it on which ranks, and both prints of the first of these ranks."""

    step: int
    parts: tuple[str, ...]
    ranks: tuple[int, ...]
    record: Print
    other: Print

    @property
    def words(self) -> str:
        """In a few words."""
        named = ", ".join(PARTS[part][1] for part in self.parts)
        return f"step {self.step}, rank {', '.join(map(str, self.ranks))}: {named}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCompared:
    """One rank of both records."""

    rank: int
    steps: tuple[int, ...] = ()  # that were compared, to the first that differs
    parts: frozenset[str] = frozenset()  # that were compared in each of these steps
    missing: int = 0  # the first step of the record that the other side lacks; 0: none
    unprinted: int = 0  # steps of the other side between these that the record lacks
    begins_equal: bool | None = None  # the weights before the first step; None: not printed
    apart: PrintDifference | None = None
    drawn: bool = False  # torch's generators stand elsewhere after it, and did not when it began
    unrestored: tuple[str, ...] = ()  # generators that stood elsewhere from the first step on, and had no effect
    entered_before: bool = False  # in the record something entered the model between the step of the checkpoint and its save


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All ranks. `changed`: (kind, words) of what differs between the launches, as `launch_facts.ChangedFact` names it."""

    ranks: Sequence[RankCompared] = ()
    changed: Sequence[tuple[str, str]] = ()

    @property
    def compared(self) -> Sequence[Any]:
        """Ranks of which a step was compared."""
        return [rank for rank in self.ranks if rank.steps]

    @property
    def steps(self) -> list[int]:
        """The steps that were compared on some rank."""
        return sorted({step for rank in self.ranks for step in rank.steps})

    @property
    def parts(self) -> frozenset[str]:
        """The parts that were compared in each step of each rank."""
        parts = [rank.parts for rank in self.compared]
        return frozenset.intersection(*parts) if parts else frozenset()

    @property
    def unrestored(self) -> tuple[str, ...]:
        """Generators that stood elsewhere from the first step on, and had no effect."""
        return tuple(part for part in GENERATORS if any(part in rank.unrestored for rank in self.ranks))

    @property
    def begins_equal(self) -> bool | None:
        """Whether all ranks began with the same weights; None where one of them has no print of them."""
        begun = {rank.begins_equal for rank in self.ranks}
        if False in begun:
            return False
        return None if None in begun or not begun else True

    @property
    def first(self) -> PrintDifference | None:
        """The first difference on any rank; `ranks` has all that differ there in the same part first."""
        found = [rank.apart for rank in self.ranks if rank.apart is not None]
        if not found:
            return None
        first = min(found, key=_order)
        ranks = [one.ranks[0] for one in found if _order(one) == _order(first)]
        return replace(first, ranks=tuple(ranks))

    @property
    def part(self) -> str:
        """The part that differs first; "" where none does."""
        return "" if self.first is None else self.first.parts[0]

    def named(self, *kinds: str) -> str:
        """What has changed of these kinds, in words."""
        return "; ".join([text for kind, text in self.changed if kind in kinds][:MOST_NAMED])


def _order(apart: PrintDifference) -> tuple[int, int]:
    return apart.step, tuple(PARTS).index(apart.parts[0])


class Row(NamedTuple):
    """A row of a table of verdicts: what it is about, when it fits, its verdict and its words. The first that fits counts."""

    name: str
    fits: Callable[[Any], object]
    verdict: Any
    words: Callable[[Any], str]


def compare_prints(
    record: Prints, other: Prints, *, start: int, until: int, begins: Mapping[int, Print] | None = None
) -> Comparison:
    """Compare the steps after `start` up to `until`, rank by rank. See `compare_rank`."""
    begun = begins or {}
    ranks = [
        compare_rank(rank, record[rank], other.get(rank, {}), start=start, until=until, begins=begun.get(rank))
        for rank in sorted(record)
    ]
    return Comparison(ranks=ranks)


def compare_rank(rank: int, record: Steps, other: Steps, *, start: int, until: int, begins: Print | None) -> RankCompared:
    """Compare the steps of one rank after `start` up to `until`. `begins`: the weights with which the other side began.

    The record's weights after step `start` are among its own prints of that step, or are those that it began with. Generators
    that stand elsewhere where they are told first are those that nobody restores: Python's and NumPy's do not count, torch's
    only where no result came out equal before the first difference.
    """
    asked = [step for step in sorted(record) if start < step <= until]
    common = [step for step in asked if step in other]
    told = next((step for step in common if SeenParts.GENERATORS in record[step].seen & other[step].seen), 0)
    apart = differing_parts(record[told], other[told]) if told else []
    idle = [part for part in apart if part in GENERATORS]
    steps: list[int] = []
    parts = set(PARTS)
    entered_before = False
    for step in common:
        own, now = record[step], other[step]
        parts.intersection_update(compared_parts(own, now))
        apart = differing_parts(own, now, idle)
        if step == start + 1 and _lacks_what_came_before(own, now, apart):
            entered_before, apart = bool(apart), []
        steps.append(step)
        if apart:
            break
    first = None
    drawn = False
    if apart:
        idle = idle if told <= step else []  # told behind it, they may stand elsewhere because of it
        is_loss_equal = SeenParts.LOSS in own.seen & now.seen and not {*DATA, "loss"} & set(apart)
        is_without_effect = is_loss_equal or (len(steps) > 1 and parts & set(RESULT))
        if "torch" in idle and not is_without_effect:
            idle.remove("torch")
            step, own, now = told, record[told], other[told]
            apart = differing_parts(own, now, idle)
            steps = [one for one in steps if one <= told]
        first = PrintDifference(step=step, parts=tuple(apart), ranks=(rank,), record=own, other=now)
        drawn = "torch" not in idle and apart[0] in RESULT and _is_drawn_otherwise(record, other, step)
    return RankCompared(
        rank=rank,
        steps=tuple(steps),
        parts=frozenset(parts.difference(idle)) if steps else frozenset(),
        missing=next((step for step in asked if step not in other), 0),
        unprinted=sum(start < one < max(steps, default=start) and one not in record for one in other),
        begins_equal=_begins_equal(record.get(start), begins, start),
        apart=first,
        drawn=drawn,
        unrestored=tuple(idle),
        entered_before=entered_before,
    )


def _lacks_what_came_before(own: Print, other: Print, apart: Sequence[str]) -> bool:
    """Whether a first step after a checkpoint is as recorded but for micro-batches that entered before the save.

    A critic is called for the loss of its generator after its own step: that counts for its next one, and no replay takes it.
    """
    needed = SeenParts.GRADIENT | SeenParts.WEIGHTS
    is_equal = not {"options", "gradient", "loss", "weights"} & set(apart) and needed in own.seen & other.seen
    return is_equal and own.batches > other.batches


def _is_drawn_otherwise(record: Steps, other: Steps, step: int) -> bool:
    """Whether torch's generators stand elsewhere when the next batch enters; optimizers may take turns with one batch."""
    for after in range(step + 1, step + 1 + MOST_TURNS):
        own, now = record.get(after), other.get(after)
        if own is not None and now is not None and SeenParts.GENERATORS in own.seen & now.seen:
            return own.torch != now.torch
    return False


def compared_parts(own: Print, other: Print) -> list[str]:
    """The parts that both sides have seen, in their order."""
    return [part for part, (seen, _) in PARTS.items() if seen in own.seen & other.seen]


def differing_parts(own: Print, other: Print, left_out: Sequence[str] = ()) -> list[str]:
    """The parts that were compared and differ.

    Another number of micro-batches comes first: generators are read when the first one enters.
    """
    is_another_number = SeenParts.BATCH in own.seen & other.seen and own.batches != other.batches
    found = ["batch"] if is_another_number else []
    for part in compared_parts(own, other):
        one, two = getattr(own, part), getattr(other, part)
        if part not in (*left_out, *found) and one != two and repr(one) != repr(two):  # NaN is what it is
            found.append(part)
    return found


def _begins_equal(own: Print | None, begins: Print | None, start: int) -> bool | None:
    if own is None or begins is None or begins.step != start or SeenParts.WEIGHTS not in own.seen & begins.seen:
        return None
    return own.weights == begins.weights
