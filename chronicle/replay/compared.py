"""Two records of prints, compared: the first step that is another one, and in which part of it.

Prints are compared step by step and rank by rank, in the order in which a step is taken: options, generators, batch, output,
gradient and its norm, loss, weights. One that only one side has seen is not compared. What is beside it (generators of the
script's own, how the models are set, labels) is read at the first step that differs: it tells only where something else
differs, too.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from chronicle.resume.ring import Print, SeenParts

__all__ = [
    "OTHERS",
    "PARTS",
    "RESULT",
    "PrintComparison",
    "PrintDifference",
    "Prints",
    "compare_prints",
    "prints_agree",
    "step_that_tells",
]

Prints = Mapping[int, Mapping[int, Print]]  # rank -> step -> print

# field of a print -> what says that it was seen, and its name in words; in the order in which a step is taken
PARTS: Mapping[str, tuple[SeenParts, str]] = {
    "options": (SeenParts.OPTIONS, "LR or options of the optimizer"),
    "torch": (SeenParts.GENERATORS, "torch's generators"),
    "python": (SeenParts.EACH_GENERATOR, "Python's generator"),
    "numpy": (SeenParts.EACH_GENERATOR, "NumPy's generator"),
    "batch": (SeenParts.BATCH, "batch"),
    "output": (SeenParts.OUTPUT, "model's output"),
    "gradient": (SeenParts.GRADIENT, "gradient"),
    "size": (SeenParts.NORM, "logged norm"),
    "loss": (SeenParts.LOSS, "loss"),
    "weights": (SeenParts.WEIGHTS, "weights"),
}
RESULT = ("output", "gradient", "size", "loss", "weights")
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
    on_its_way: bool = False  # in the record the batch of the first step that differs was not a loader's as it was yielded
    became_another: bool = False  # the batch of the first step that differs was handed over alike, and entered otherwise
    labels_differ: bool | None = None  # or how the loss was computed: equal output and another gradient of it; None: unknown
    own_moved: bool | None = None  # the script's own generators stand elsewhere then, and did not before; None: all the time
    set_anew: bool | None = None  # the models are set otherwise then, and were not before; None: all the time
    drawn: str = ""  # which generators stand elsewhere after the first step that differs, and not when it began
    unrestored: tuple[str, ...] = ()  # which generators stood elsewhere from the first step on, and had no effect
    entered_before: bool = False  # in the record, something entered the model between the step of the checkpoint and its save


def compare_prints(
    record: Prints, replay: Prints, *, start: int, until: int, begins: Mapping[int, Print]
) -> PrintComparison:
    """Compare the steps after `start` up to `until`. `begins`: the replay's prints of the weights that it began with.

    The record's weights after step `start` are among its own prints of that step, or are those that it began with. Where no
    print of the first steps tells of generators (the model is called within the optimizer's step), Python's and NumPy's are
    those that nobody restores only if all else is equal. So are torch's, where they stand elsewhere from the first step on.
    """
    found = _compare(record, replay, start, until, begins, told_late=True)
    if found.first is not None and found.unrestored:
        found = _compare(record, replay, start, until, begins, told_late=False)
    if found.first is not None and found.first.parts[0] == "torch":
        without = _compare(record, replay, start, until, begins, told_late=True, left_out=("torch", *OTHERS))
        return without if without.first is None else found
    return found


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
    drawn, on_its_way, became_another = "", False, False
    own_moved: bool | None = False
    set_anew: bool | None = False
    own_was_equal = was_set_equal = True
    entered_before = False
    labels_differ = None
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
            apart = {part for _, own, other in pairs for part in _differing(own, other)}
            unrestored = (*unrestored, *(part for part in left_out if part in apart and part not in unrestored))
        is_first = is_first and told_late and not any(SeenParts.GENERATORS in own.seen & other.seen for _, own, other in pairs)
        found = [(rank, own, other, tuple(_differing(own, other, unrestored))) for rank, own, other in pairs]
        if step == start + 1 and all(_lacks_what_came_before(own, other, apart) for _, own, other, apart in found):
            entered_before = any(apart for _, _, _, apart in found)
            found = []
        wrong = [row for row in found if row[3]]
        if wrong:
            at = min(wrong, key=lambda row: tuple(PARTS).index(row[3][0]))
            ranks = tuple(row[0] for row in wrong if row[3][0] == at[3][0])
            first = PrintDifference(step=step, parts=at[3], ranks=ranks, record=at[1], other=at[2])
            on_its_way = at[3][0] in RESULT and _is_changed_on_its_way(record, replay, step)
            became_another = at[3][0] == "batch" and not any(_is_handed_otherwise(own, other) for _, own, other in pairs)
            drawn = _which_are_drawn(record, replay, step) if at[3][0] in RESULT or became_another else ""
            if _is_any_apart(pairs, _is_own_apart) and _stays_apart(record, replay, step):
                own_moved = True if own_was_equal else None
            if _is_any_apart(pairs, _is_set_apart):
                set_anew = True if was_set_equal else None
            labels_differ = _do_labels_differ((own, other) for _, own, other in pairs)
            gap = sum(last < one < step for one in unprinted)
            steps.append(step)
            break
        steps.append(step)
        own_was_equal, was_set_equal = not _is_any_apart(pairs, _is_own_apart), not _is_any_apart(pairs, _is_set_apart)
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
        own_moved=own_moved,
        set_anew=set_anew,
        entered_before=entered_before,
        labels_differ=labels_differ,
        on_its_way=on_its_way,
        became_another=became_another,
    )


def _is_changed_on_its_way(record: Prints, replay: Prints, step: int) -> bool:
    """Whether in this step alone some rank's micro-batches were not in the memory in which a loader had yielded them.

    The replay's did, and so did those of the steps beside it: somebody copied and changed them, between loader and model.
    """

    def whole(rows: Mapping[int, Print], at: int) -> bool:
        return at in rows and SeenParts.TARGETS in rows[at].seen

    return any(
        not whole(rows, step) and whole(replay.get(rank, {}), step) and (whole(rows, step - 1) or whole(rows, step + 1))
        for rank, rows in record.items()
        if step in rows and SeenParts.BATCH in rows[step].seen
    )


def _is_handed_otherwise(one: Print, other: Print) -> bool:
    """Whether the upper halves of what was handed to the model differ (`digest_of_batches`)."""
    return one.batches != other.batches or one.batch >> 32 != other.batch >> 32


def _is_own_apart(one: Print, other: Print) -> bool:
    return SeenParts.OWN in one.seen & other.seen and one.own != other.own


def _lacks_what_came_before(own: Print, other: Print, apart: Sequence[str]) -> bool:
    """Whether a first step after a checkpoint is as recorded but for micro-batches that entered before the save.

    A critic is called for the loss of its generator after its own step: that counts for its next one, and no replay takes it.
    """
    if not apart:
        return True
    needed = SeenParts.GRADIENT | SeenParts.WEIGHTS
    is_equal = not {"options", "gradient", "loss", "weights"} & set(apart) and needed in own.seen & other.seen
    return is_equal and own.batches > other.batches


def _is_set_apart(one: Print, other: Print) -> bool:
    return SeenParts.MODES in one.seen & other.seen and one.modes != other.modes


def _is_any_apart(pairs: Iterable[tuple[int, Print, Print]], is_apart: Callable[[Print, Print], bool]) -> bool:
    return any(is_apart(own, other) for _, own, other in pairs)


def _stays_apart(record: Prints, replay: Prints, step: int) -> bool:
    """Whether the script's own generators differ in the last step that both took, too: two draws that changed places do not."""
    last = []
    for rank, rows in record.items():
        others = replay.get(rank, {})
        at = max((one for one in rows.keys() & others.keys() if one > step), default=0)
        last += [_is_own_apart(rows[at], others[at])] if at else []
    return not last or any(last)


def _do_labels_differ(pairs: Iterable[tuple[Print, Print]]) -> bool | None:
    """Whether the models gave the same in a step, and the gradient that came back on some rank is another. None: not seen.

    Where one rank's model gave something else, no label is to blame: it comes in later. The others may meet that in their own
    gradient, for a loss may gather what all ranks' models gave.
    """
    wanted = SeenParts.OUTPUT | SeenParts.PULL
    seen = [(one, other) if wanted in one.seen & other.seen else None for one, other in pairs]
    known = [pair for pair in seen if pair is not None]
    if any(one.output != other.output for one, other in known):
        return False
    if any(one.pull != other.pull for one, other in known):
        return True
    return None if None in seen else False


def _which_are_drawn(record: Prints, replay: Prints, step: int) -> str:
    """Which generators of some rank stand elsewhere when the next batch enters, and did not in this one; in words."""

    def pairs(at: int) -> list[tuple[int, Print, Print]]:
        rows = [(rank, own.get(at), replay.get(rank, {}).get(at)) for rank, own in record.items()]
        return [(rank, own, other) for rank, own, other in rows if own is not None and other is not None]

    after = step_that_tells(record, step)
    if after is None:
        return ""
    if any("torch" in _differing(own, other) for _, own, other in pairs(after)):
        return "torch's generators"
    was_equal = not _is_any_apart(pairs(step), _is_own_apart)
    return "the script's own generators" if was_equal and _is_any_apart(pairs(after), _is_own_apart) else ""


def step_that_tells(record: Prints, step: int) -> int | None:
    """The step after this one whose prints tell where the generators stood, which is where this one left them.

    The next one, but for several optimizers that take turns with one batch.
    """
    near = range(step + 1, step + 1 + MOST_TURNS)
    return next((at for at in near if all(_tells(rows, at) for rows in record.values())), None)


def _tells(rows: Mapping[int, Print], step: int) -> bool:
    return step in rows and SeenParts.GENERATORS in rows[step].seen


def _differing(own: Print, other: Print, left_out: Sequence[str] = ()) -> Iterator[str]:
    """SeenParts that differ; one that only one side has seen is not compared."""
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
            if any(_differing(a, b, OTHERS)):
                return False
    return True if compared else None
