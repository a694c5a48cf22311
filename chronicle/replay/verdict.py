"""What a replay proves: the first step that is another one, in which part of it, and so who is to blame.

Prints are compared step by step and rank by rank, in the order in which a step is taken: options, generators, batch, gradient,
loss, weights. The first part that differs decides:

    all equal                     reproduced: what happened is in the data and the weights
    code, packages                code or packages differ, where one of them is known to have changed
    the weights it began with     state differs: the checkpoint does not hold what the training had; moments and what else the
                                  guard compared at the load, too, where the result is another one in the first steps
    environment, files            code or packages differ, where one of them is known to have changed (data differ, where it is
                                  none of settings)
    generators, options           state differs: random numbers, learning rate; generators of the script's own, and how the
                                  models are set (training, dropout, frozen weights), where something else differs, too
    batch                         data differ
                                  (two replays whose generators or batches disagree: not deterministic)
    gradient, loss, weights       equal input, another result: another replay tells, from an earlier place of the same launch.
                                  Two that agree with each other and not with the record: hardware or race. Is the step as
                                  recorded from the earlier place: state differs (the checkpoint lacks something). Two from one
                                  place that disagree: not deterministic

A replay from one checkpoint alone proves nothing of the hardware: what no checkpoint holds (a counter, a pool of samples), or
what this one holds otherwise, gives another result in every replay from it. From the beginning of a launch nothing of the kind
is possible.

Hardware is named only where everything else that could be the cause was compared and is equal. Else the verdict is "not told",
with what is missing.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from chronicle.replay.ring import Print, SeenParts
from chronicle.resume.checks.check import Outcome

__all__ = [
    "PARTS",
    "RESULT",
    "PrintComparison",
    "PrintDifference",
    "ReplayPlace",
    "ReplayVerdict",
    "Ruling",
    "StateLoaded",
    "compare_prints",
    "judge_replay",
    "own_generators_vary",
    "prints_agree",
    "state_loaded",
]

Prints = Mapping[int, Mapping[int, Print]]  # rank -> step -> print


class ReplayVerdict(StrEnum):
    """The verdicts of a replay."""

    REPRODUCED = "reproduced"
    DATA = "data differ"
    CODE = "code or packages differ"
    STATE = "state differs"
    HARDWARE = "hardware or race"
    RANDOM = "not deterministic"
    NOT_TOLD = "not told"
    NOT_COMPARED = "not compared"


# field of a print -> what says that it was seen, and its name in words; in the order in which a step is taken
PARTS: Mapping[str, tuple[SeenParts, str]] = {
    "options": (SeenParts.OPTIONS, "LR or options of the optimizer"),
    "torch": (SeenParts.GENERATORS, "torch's generators"),
    "python": (SeenParts.EACH_GENERATOR, "Python's generator"),
    "numpy": (SeenParts.EACH_GENERATOR, "NumPy's generator"),
    "batch": (SeenParts.BATCH, "batch"),
    "output": (SeenParts.OUTPUT, "model's output"),
    "gradient": (SeenParts.GRADIENT, "gradient"),
    "loss": (SeenParts.LOSS, "loss"),
    "weights": (SeenParts.WEIGHTS, "weights"),
}
RESULT = ("output", "gradient", "loss", "weights")
OTHERS = ("python", "numpy")  # generators that many scripts use for nothing, and restore in no launch
ENTERS = ("torch", *OTHERS, "batch")


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
    labels_differ: bool | None = None  # or how the loss was computed: equal output and another gradient of it; None: unknown
    own_moved: bool | None = None  # the script's own generators stand elsewhere then, and did not before; None: all the time
    set_anew: bool | None = None  # the models are set otherwise then, and were not before; None: all the time
    drawn: str = ""  # which generators stand elsewhere in the step after the first one that differs, and not in that one
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
    drawn, on_its_way = "", False
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
            drawn = _which_are_drawn(record, replay, step) if at[3][0] in RESULT else ""
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
    """Whether on some rank the model gave the same in a step, and the gradient that came back is another. None: not seen."""
    wanted = SeenParts.OUTPUT | SeenParts.PULL
    found = [one.pull != other.pull and one.output == other.output if wanted in one.seen & other.seen else None
             for one, other in pairs]  # fmt: skip
    return True if any(found) else None if None in found else False


def _which_are_drawn(record: Prints, replay: Prints, step: int) -> str:
    """Which generators of some rank stand elsewhere when the step after this one begins, and did not in this one; in words."""

    def pairs(at: int) -> list[tuple[int, Print, Print]]:
        rows = [(rank, own.get(at), replay.get(rank, {}).get(at)) for rank, own in record.items()]
        return [(rank, own, other) for rank, own, other in rows if own is not None and other is not None]

    if any("torch" in _differing(own, other) for _, own, other in pairs(step + 1)):
        return "torch's generators"
    was_equal = not _is_any_apart(pairs(step), _is_own_apart)
    return "the script's own generators" if was_equal and _is_any_apart(pairs(step + 1), _is_own_apart) else ""


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


# ---- the state that it began with, as the guard saw it -----------------------------------------------------------------

MOST_WORDS = 4  # of one kind
LATE = 2  # steps after which a difference in the state is in the samples at last
STATE_IN_MEMORY = "M1"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLoaded:
    """What a replay's guard found when its checkpoint was loaded, beside what was in memory at the save.

    `unlike`: what differs, in words. `compared`: the optimizer's moments were, or there are none.
    """

    unlike: tuple[str, ...] = ()
    compared: bool = True


def state_loaded(verdicts: Iterable[Mapping[str, Any]]) -> StateLoaded:
    """Read it from the guard's verdicts of the replay, as the journal keeps them."""
    checks = [check for verdict in verdicts for check in verdict.get("checks", ())]
    unlike = (
        f"{check['name']}: {check.get('expected', '?')} at the save, {check.get('found', '?')} after the load"
        for check in checks
        if check.get("code") == STATE_IN_MEMORY and check.get("outcome") == Outcome.DIFFERENT
    )
    moments = [check for check in checks if check.get("name") == "optimizer moments"]
    states = [check for check in checks if check.get("name") == "parameters with state"]
    has_none = bool(states) and all(check.get("expected") == check.get("found") == "0" for check in states)
    return StateLoaded(unlike=tuple(dict.fromkeys(unlike)), compared=bool(moments) or has_none)


# ---- the verdict -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlace:
    """Where a replay began. `is_whole`: nothing that it lacks can be the cause, because the launch began there as well, or
    (`agreed`) a replay from an earlier place gave the same. `reproduced_from`: an earlier place from which the step is as
    recorded. `by_clock`: it is as recorded where the clock stands as it stood then.
    """

    words: str = "its beginning"
    by_clock: bool = False
    agreed: bool = False
    is_whole: bool = True
    reproduced_from: str = ""
    doubt: str = "no replay from an earlier place was played"
    own_varied: bool = False  # that place left the script's own generators elsewhere, and the result is the same
    has_checkpoint: bool = True  # else it began as the launch did, and made its weights itself


BEGINNING = ReplayPlace()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """The verdict, why, and the evidence, one sentence each. `again`: a second replay is needed to tell."""

    verdict: ReplayVerdict
    why: str
    evidence: tuple[str, ...] = field(default=())
    again: bool = False


def judge_replay(
    one: PrintComparison,
    replays_agree: bool | None,
    *,
    changed: Sequence[tuple[str, str]],
    facts_known: bool,
    load: StateLoaded,
    place: ReplayPlace = BEGINNING,
    unrecorded: Sequence[str] = (),
    networks: Sequence[str] = (),
) -> Ruling:
    """The verdict. `changed`: (kind, words) of what is known to differ between the launches, as `facts.ChangedFact` names it;
    kind `setting`: a variable that the script itself reads; kind `data`: a file that is none of settings.

    `replays_agree`: whether a second replay has the same prints, from here or from an earlier place; None where there was none.
    `facts_known`: both launches said what they were made by. `unrecorded`: what the replay took from outside, and nobody knows
    what it was in the record. `place`: where the replay began, and what one from elsewhere says.
    """
    words = tuple(f"{kind}: {text}" for kind, text in changed)
    if not one.steps:
        return Ruling(verdict=ReplayVerdict.NOT_COMPARED, why=_why_not(one), evidence=words)
    if one.first is None:
        return _all_equal(one, words)
    evidence = (f"first difference: {one.first.words}", *words)
    code = [text for kind, text in changed if kind in ("code", "package", "setting")]
    if code:
        return Ruling(verdict=ReplayVerdict.CODE, why="; ".join(code[:4]), evidence=evidence)
    if one.begins_equal is False and not place.has_checkpoint:
        return _other_beginning(changed, replays_agree, evidence)
    if one.begins_equal is False:
        why = "the checkpoint does not hold the weights that the training had at this step"
        why = f"from {place.reproduced_from} the step is as recorded: {why}" if place.reproduced_from else why
        # a weight that changed after the save, before the next batch, looks the same: an earlier place tells
        return Ruling(verdict=ReplayVerdict.STATE, why=why, evidence=evidence, again=replays_agree is None)
    parts, first = one.first.parts, one.first
    if parts[0] == "options":
        lrs = f": LR {first.record.lr:g} in the record, {first.other.lr:g} in the replay"
        lrs = lrs if first.record.lr != first.other.lr else ""
        return Ruling(verdict=ReplayVerdict.STATE, why=f"other options of the optimizer{lrs}", evidence=evidence)
    if parts[0] in ENTERS and replays_agree is False:
        origin = "one checkpoint" if place.has_checkpoint else "its beginning"
        why = f"two replays from {origin} disagree in what enters the step ({PARTS[parts[0]][1]}): it is not repeatable"
        return Ruling(verdict=ReplayVerdict.RANDOM, why=why, evidence=evidence)
    again = replays_agree is None
    if parts[0] in ("torch", *OTHERS):
        why = f"{PARTS[parts[0]][1]} {'stand' if parts[0] == 'torch' else 'stands'} elsewhere from step {first.step} on"
        return Ruling(verdict=ReplayVerdict.STATE, why=why, evidence=evidence, again=again)
    known = any(kind in ("environment", "arithmetic", "file", "data") for kind, _ in changed)
    if one.own_moved and replays_agree is not False and not known:
        why = f"the generators that the script made for itself stand elsewhere from step {first.step} on"
        return Ruling(verdict=ReplayVerdict.STATE, why=why, evidence=evidence, again=again)
    if one.set_anew and replays_agree is not False and parts[0] != "batch":
        why = f"at step {first.step} the models are set otherwise than in the record (training or evaluation, dropout, frozen "
        why += "weights, autocast)"
        return Ruling(verdict=ReplayVerdict.STATE, why=why, evidence=evidence, again=again)
    if parts[0] == "batch":
        same = " (as many micro-batches)" if first.record.batches == first.other.batches else ""
        why = f"another batch at step {first.step}{same}"
        return Ruling(verdict=ReplayVerdict.DATA, why=why, evidence=evidence, again=again)
    if one.on_its_way:
        why = f"the batch of step {first.step} did not enter the model as its loader yielded it: it was changed on its way"
        return Ruling(verdict=ReplayVerdict.DATA, why=why, evidence=evidence)
    other = [text for kind, text in changed if kind in ("environment", "arithmetic", "file")]
    if other:
        return Ruling(verdict=ReplayVerdict.CODE, why="; ".join(other[:4]), evidence=evidence)
    data = [text for kind, text in changed if kind == "data"]
    if data:
        return Ruling(verdict=ReplayVerdict.DATA, why="; ".join(data[:4]), evidence=evidence)
    if load.unlike and len(one.steps) <= 1 + LATE:
        why = f"the checkpoint does not hold what the training had: {'; '.join(load.unlike[:3])}"
        return Ruling(verdict=ReplayVerdict.STATE, why=why, evidence=evidence)
    if one.drawn:
        why = f"random numbers were drawn otherwise, or seeded, within step {first.step}: {one.drawn} tell"
        return Ruling(verdict=ReplayVerdict.STATE, why=why, evidence=evidence)
    doubts = [text for kind, text in changed if kind == "doubt"]
    if one.own_moved is None and not place.own_varied:
        doubts.append("generators that the script made for itself stand elsewhere from the first step on")
    if one.set_anew is None:
        doubts.append("the models are set otherwise from the first step on (training or evaluation, dropout, frozen weights)")
    missing = (*_not_ruled_out(one, load, place, facts_known=facts_known), *doubts, *_few(unrecorded))
    labels = [SeenParts.TARGETS in side.seen for side in (first.record, first.other)]
    if one.labels_differ is not None:  # where outputs differ, they do before any label comes in
        if one.labels_differ and all(labels):
            evidence = (*evidence, "the labels are those that the loader yielded: they may have been changed after it")
        if one.labels_differ and networks:
            missing = (*missing, f"labels may be others, or the weights of another network ({', '.join(networks[:4])})")
    elif "batch" in one.parts and not all(labels):
        missing = (*missing, "labels, which do not enter the model, may be others (what it gave is in no print)")
    return _another_result(one, replays_agree, evidence, missing, place, labels_differ=bool(one.labels_differ))


def _other_beginning(
    changed: Sequence[tuple[str, str]], replays_agree: bool | None, evidence: tuple[str, ...]
) -> Ruling:
    """The launch made other weights to begin with than in the record; no checkpoint is to blame.

    `replays_agree`: whether another replay begins with the weights of this one.
    """
    if replays_agree is False:
        why = "the launch begins with other weights every time (what they are made from is not seeded): only steps after a "
        why += "checkpoint can be taken again"
        return Ruling(verdict=ReplayVerdict.RANDOM, why=why, evidence=evidence)
    other = [text for kind, text in changed if kind in ("environment", "arithmetic", "file", "data")]
    if other:
        return Ruling(verdict=ReplayVerdict.CODE, why="; ".join(other[:4]), evidence=evidence)
    why = "the launch began with other weights than it begins with now: what they are made from (a file, a seed) is another"
    return Ruling(verdict=ReplayVerdict.STATE, why=why, evidence=evidence, again=replays_agree is None)


def _another_result(
    one: PrintComparison,
    replays_agree: bool | None,
    evidence: tuple[str, ...],
    missing: tuple[str, ...],
    place: ReplayPlace,
    *,
    labels_differ: bool,
) -> Ruling:
    """Equal input as far as it was compared, and another result. `missing`: what may be the cause as well."""
    assert one.first is not None
    if replays_agree is False and place.by_clock:
        why = f"where the clock stands as in the record, step {one.first.step} is as recorded: what reads it enters the step"
        return Ruling(verdict=ReplayVerdict.RANDOM, why=why, evidence=evidence)
    if replays_agree is False:
        why = "two replays from one checkpoint disagree: the arithmetic itself is not repeatable"
        return Ruling(verdict=ReplayVerdict.RANDOM, why=why, evidence=evidence)
    if replays_agree is None:
        why = "equal input and another result: a second replay would tell"
        return Ruling(verdict=ReplayVerdict.NOT_TOLD, why=why, evidence=evidence, again=True)
    if place.reproduced_from:
        why = f"from {place.reproduced_from} step {one.first.step} is as recorded, from {place.words} it is not: "
        why += "this checkpoint does not hold all that the training had"
        return Ruling(verdict=ReplayVerdict.STATE, why=why, evidence=evidence)
    if labels_differ and not missing:
        why = f"the model gave the same at step {one.first.step}, and the gradient that came back to it is another: labels, "
        why += "or how the loss is computed from them, were others"
        return Ruling(verdict=ReplayVerdict.DATA, why=why, evidence=evidence)
    if not place.is_whole:
        missing = (*missing, f"the training may have had what its checkpoints do not hold ({place.doubt})")
    if missing:
        why = f"two replays agree, and it is not ruled out: {'; '.join(missing)}"
        return Ruling(verdict=ReplayVerdict.NOT_TOLD, why=why, evidence=evidence)
    ranks = ", ".join(map(str, one.first.ranks))
    why = f"equal input, and two replays agree with each other and not with the record: step {one.first.step}, rank {ranks}"
    return Ruling(verdict=ReplayVerdict.HARDWARE, why=why, evidence=evidence)


def _few(words: Sequence[str]) -> Iterator[str]:
    yield from words[:MOST_WORDS]
    if len(words) > MOST_WORDS:
        yield f"{len(words) - MOST_WORDS} more of this kind"


def _not_ruled_out(one: PrintComparison, load: StateLoaded, place: ReplayPlace, *, facts_known: bool) -> Iterator[str]:
    """What may be the cause as well, because it was not compared."""
    assert one.first is not None
    if not place.agreed:
        yield from (f"{text} (without effect in {len(one.steps) - 1} steps)" for text in load.unlike[:3])
        if not load.compared:
            yield "the checkpoint may hold other moments than the training had (they were not compared at its load)"
        if one.begins_equal is None and place.has_checkpoint:
            yield "the checkpoint may hold other weights than the training had (no print of them in the record)"
    if one.begins_equal is None and not place.has_checkpoint and len(one.steps) == 1:
        yield "the launch may have begun with other weights (no print of them in the record)"
    if one.gap:
        yield f"{one.gap} steps before it have no print (`CHRONICLE_PRINTS=every`)"
    if not facts_known:
        yield "the code may have changed (no `prints.json` of the launch)"
    for part in ("options", "torch", "batch"):
        if part not in one.parts:
            yield f"{PARTS[part][1]}: not in the prints"


def _all_equal(one: PrintComparison, words: tuple[str, ...]) -> Ruling:
    if not one.parts & {"gradient", "weights", "loss"}:
        return Ruling(verdict=ReplayVerdict.NOT_COMPARED, why="the prints hold no gradient, loss or weights", evidence=words)
    if one.missing:
        why = f"the replay has no print of step {one.missing[0]}, of which the record has one"
        return Ruling(verdict=ReplayVerdict.NOT_COMPARED, why=why, evidence=words)
    named = ", ".join(PARTS[part][1] for part in PARTS if part in one.parts)
    why = f"{len(one.steps)} step{'' if len(one.steps) == 1 else 's'}, every print equal: {named}"
    more: tuple[str, ...] = ()
    unseen = [PARTS[part][1] for part in ("options", "torch", "batch", "gradient", "weights")
              if part not in one.parts and part not in one.unrestored]  # fmt: skip
    if unseen:
        more = (f"not in every print, and so not compared: {', '.join(unseen)}",)
    if one.entered_before:
        what = "gradient and weights are equal"
        more += (f"step {one.steps[0]}: the model was called between the step before and the save; {what}",)
    if one.unprinted:
        more += (f"{len(one.unprinted)} steps between them have no print in the record",)
    if one.unrestored:
        named = " and ".join(PARTS[part][1] for part in one.unrestored)
        them = "it" if len(one.unrestored) == 1 else "them"
        more += (f"{named}: not as in the record, because nobody restores {them}; no effect is seen",)
    return Ruling(verdict=ReplayVerdict.REPRODUCED, why=why, evidence=(*more, *words))


def _why_not(one: PrintComparison) -> str:
    if one.missing:
        return f"the replay took no step that the record has a print of (the first is {one.missing[0]})"
    return "the record has no print of these steps"


def own_generators_vary(one: Prints, other: Prints, step: int) -> bool:
    """Whether the script's own generators stand elsewhere in one replay than in another when a step begins, on every rank."""
    pairs = [(rows.get(step), other.get(rank, {}).get(step)) for rank, rows in one.items()]
    return all(a is not None and b is not None and _is_own_apart(a, b) for a, b in pairs)


def prints_agree(one: Prints, other: Prints, steps: Iterable[int], *, first: int | None = None) -> bool | None:
    """Whether two replays have equal prints in these steps; None where nothing could be compared.

    `first`: the step that `one` took first, and `other` did not: what entered before the save is in that of `other` alone.
    Python's and NumPy's generators do not count: where they differ and the rest agrees, they have no effect.
    """
    compared = False
    for step in steps:
        for rank in one:
            a, b = one[rank].get(step), other.get(rank, {}).get(step)
            if a is None or b is None:
                return None
            compared = True
            apart = tuple(_differing(a, b, OTHERS))
            if apart and not (step == first and _lacks_what_came_before(b, a, apart)):
                return False
    return True if compared else None
