"""Two records of prints, compared: the first step that is another one, and in which part of it.

Prints are compared step by step and rank by rank, in the order in which a step is taken: options, generators, batch,
gradient and its norm, loss, weights. One that only one side has seen is not compared. How the models are set is read at the
first step that differs: it tells only where something else differs, too.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from chronicle.resume.ring import Print, SeenParts

Prints = Mapping[int, Mapping[int, Print]]  # rank -> step -> print

# field of a print -> what says that it was seen, and its name in words; in the order in which a step is taken
PARTS: Mapping[str, tuple[SeenParts, str]] = {
    "options": (SeenParts.OPTIONS, "LR or options of the optimizer"),
    "torch": (SeenParts.GENERATORS, "torch's generators"),
    "python": (SeenParts.GENERATORS, "Python's generator"),
    "numpy": (SeenParts.GENERATORS, "NumPy's generator"),
    "batch": (SeenParts.BATCH, "batch"),
    "gradient": (SeenParts.GRADIENT, "gradient"),
    "size": (SeenParts.NORM, "logged norm"),
    "loss": (SeenParts.LOSS, "loss"),
    "weights": (SeenParts.WEIGHTS, "weights"),
}
RESULT = ("gradient", "size", "loss", "weights")
MOST_TURNS = 4  # of optimizers, with one batch
OTHERS = ("python", "numpy")  # generators that many scripts use for nothing, and restore in no launch


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
        ranks = ", ".join(map(str, self.ranks))
        return f"step {self.step}, rank {ranks}: {named}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintComparison:
    """One replay against the record."""

    steps: tuple[int, ...] = ()  # of which a print of every rank was compared
    parts: frozenset[str] = frozenset()  # that were compared in each of these steps
    missing: tuple[int, ...] = ()  # steps of the record that the replay lacks
    unprinted: tuple[int, ...] = ()  # steps that were asked for, and that the record lacks
    begins_equal: bool | None = None  # the weights it began with; None: the record lacks them
    first: PrintDifference | None = None
    gap: int = 0  # steps without a print right before the first difference
    set_anew: bool = False  # the models are set otherwise at the first step that differs, and were not before
    drawn: bool = False  # torch's generators stand elsewhere after the first step that differs, and not when it began
    unrestored: tuple[str, ...] = ()  # which generators stood elsewhere from the first step on, and had no effect
    entered_before: bool = False  # in the record, something entered the model between the step of the checkpoint and its save


def compare_prints(
    record: Prints, replay: Prints, *, start: int, until: int, begins: Mapping[int, Print], by_effect: bool = False
) -> PrintComparison:
    """Compare the steps after `start` up to `until`. `begins`: the replay's prints of the weights that it began with.

    The record's weights after step `start` are among its own prints of that step, or are those that it began with. Where no
    print of the first steps tells of generators (the model is called within the optimizer's step), Python's and NumPy's are
    those that nobody restores only if all else is equal. So are torch's, where they stand elsewhere from the first step on;
    with `by_effect` also if what came out of it was equal until then.
    """
    found = _compare(record, replay, start, until, begins, told_late=True)
    if found.first is not None and found.unrestored:
        found = _compare(record, replay, start, until, begins, told_late=False)
    if found.first is not None and found.first.parts[0] == "torch":
        without = _compare(record, replay, start, until, begins, told_late=True, left_out=("torch", *OTHERS))
        return without if without.first is None or (by_effect and _had_no_effect(without)) else found
    return found


def _had_no_effect(without: PrintComparison) -> bool:
    """Whether generators stood elsewhere when a result or at least a loss came out equal: then the step draws nothing."""
    first = without.first
    assert first is not None
    if len(without.steps) > 1 and without.parts & set(RESULT):
        return True
    is_seen = SeenParts.LOSS in first.record.seen & first.other.seen
    return is_seen and not {"batch", "loss"} & set(first.parts)


def _compare(
    record: Prints,
    replay: Prints,
    start: int,
    until: int,
    begins: Mapping[int, Print],
    *,
    told_late: bool,
    left_out: Sequence[str] = OTHERS,
) -> PrintComparison:
    """`left_out`: which generators do not count if they stand elsewhere from the first step on."""
    steps: list[int] = []
    missing: list[int] = []
    unprinted: list[int] = []
    parts = frozenset(PARTS)
    first: PrintDifference | None = None
    last = start
    gap = 0
    drawn = set_anew = entered_before = False
    was_set_equal = True
    unrestored: tuple[str, ...] = ()
    is_first = True
    for step in range(start + 1, until + 1):
        rows = [(rank, record[rank].get(step), replay.get(rank, {}).get(step)) for rank in sorted(record)]
        if any(own is None for _, own, _ in rows):
            if any(other is not None for _, _, other in rows):  # else it is no step: of several optimizers all steps may count
                unprinted.append(step)
            continue
        if any(other is None for _, _, other in rows):
            missing.append(step)
            continue
        pairs = [(rank, own, other) for rank, own, other in rows if own is not None and other is not None]
        for _, own, other in pairs:
            parts &= frozenset(part for part, (seen, _) in PARTS.items() if seen in own.seen and seen in other.seen)
        if is_first:
            apart = {part for _, own, other in pairs for part in differing_parts(own, other)}
            unrestored = (*unrestored, *(part for part in left_out if part in apart and part not in unrestored))
        is_first = is_first and told_late and not any(SeenParts.GENERATORS in own.seen & other.seen for _, own, other in pairs)
        found = [(rank, own, other, tuple(differing_parts(own, other, unrestored))) for rank, own, other in pairs]
        if step == start + 1 and all(_lacks_what_came_before(own, other, apart) for _, own, other, apart in found):
            entered_before = any(apart for _, _, _, apart in found)
            found = []
        wrong = [row for row in found if row[3]]
        if wrong:
            at = min(wrong, key=lambda row: tuple(PARTS).index(row[3][0]))
            ranks = tuple(row[0] for row in wrong if row[3][0] == at[3][0])
            first = PrintDifference(step=step, parts=at[3], ranks=ranks, record=at[1], other=at[2])
            drawn = at[3][0] in RESULT and _is_drawn_otherwise(record, replay, step)
            set_anew = was_set_equal and _is_any_set_apart(pairs)
            gap = sum(last < one < step for one in unprinted)
            steps.append(step)
            break
        steps.append(step)
        was_set_equal = not _is_any_set_apart(pairs)
        last = step
    return PrintComparison(
        steps=tuple(steps),
        parts=parts - set(unrestored) if steps else frozenset(),
        unrestored=unrestored,
        missing=tuple(missing),
        unprinted=tuple(unprinted),
        begins_equal=_begins_equal(record, begins, start),
        first=first,
        gap=gap,
        drawn=drawn,
        set_anew=set_anew,
        entered_before=entered_before,
    )


def _lacks_what_came_before(own: Print, other: Print, apart: Sequence[str]) -> bool:
    """Whether a first step after a checkpoint is as recorded but for micro-batches that entered before the save.

    A critic is called for the loss of its generator after its own step: that counts for its next one, and no replay takes it.
    """
    if not apart:
        return True
    needed = SeenParts.GRADIENT | SeenParts.WEIGHTS
    is_equal = not {"options", "gradient", "loss", "weights"} & set(apart) and needed in own.seen & other.seen
    return is_equal and own.batches > other.batches


def _is_any_set_apart(pairs: Iterable[tuple[int, Print, Print]]) -> bool:
    return any(SeenParts.MODES in own.seen & other.seen and own.modes != other.modes for _, own, other in pairs)


def _is_drawn_otherwise(record: Prints, replay: Prints, step: int) -> bool:
    """Whether torch's generators of some rank stand elsewhere when the next batch enters."""
    after = step_that_tells(record, step)
    if after is None:
        return False
    for rank, rows in record.items():
        other = replay.get(rank, {}).get(after)
        if other is not None and "torch" in differing_parts(rows[after], other):
            return True
    return False


def step_that_tells(record: Prints, step: int) -> int | None:
    """The step after this one whose prints tell where the generators stood, which is where this one left them.

    The next one, but for several optimizers that take turns with one batch.
    """
    near = range(step + 1, step + 1 + MOST_TURNS)
    return next((at for at in near if all(_tells(rows, at) for rows in record.values())), None)


def _tells(rows: Mapping[int, Print], step: int) -> bool:
    return step in rows and SeenParts.GENERATORS in rows[step].seen


def differing_parts(own: Print, other: Print, left_out: Sequence[str] = ()) -> Iterator[str]:
    """The parts that differ; one that only one side has seen is not compared."""
    if own.batches != other.batches and SeenParts.BATCH in own.seen and SeenParts.BATCH in other.seen:
        yield "batch"
    for part, (seen, _) in PARTS.items():
        if part in left_out or seen not in own.seen or seen not in other.seen:
            continue
        a, b = getattr(own, part), getattr(other, part)
        if part == "batch" and own.batches != other.batches:
            continue  # told already
        if part == "batch" and (SeenParts.TARGETS in own.seen) != (SeenParts.TARGETS in other.seen):
            continue  # one of them holds the labels, too
        if a != b and not (isinstance(a, float) and math.isnan(a) and math.isnan(b)):
            yield part


def _begins_equal(record: Prints, begins: Mapping[int, Print], start: int) -> bool | None:
    found = []
    for rank, other in begins.items():
        own = record.get(rank, {}).get(start)
        if own is not None and SeenParts.WEIGHTS in own.seen and SeenParts.WEIGHTS in other.seen and other.step == start:
            found.append(own.weights == other.weights)
    return all(found) if found and len(found) == len(record) else None


def prints_agree(one: Prints, other: Prints, steps: Iterable[int]) -> bool | None:
    """Whether two replays have equal prints in these steps; None where nothing could be compared.

    Python's and NumPy's generators do not count: where they differ and the rest agrees, they have no effect.
    """
    compared = False
    for step in steps:
        for rank in one:
            a, b = one[rank].get(step), other.get(rank, {}).get(step)
            if a is None or b is None:
                return None
            compared = True
            if any(differing_parts(a, b, OTHERS)):
                return False
    return True if compared else None
