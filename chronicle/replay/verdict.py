"""What a replay proves: the first step that is another one, in which part of it, and so who is to blame.

The first part of the first step that differs (`compared.py`) decides:

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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from chronicle.replay.compared import OTHERS, PARTS, PrintComparison
from chronicle.replay.watched import IS_NEWER
from chronicle.resume.checks.check import Outcome
from chronicle.resume.ring import SeenParts

__all__ = [
    "ReplayPlace",
    "ReplayVerdict",
    "Ruling",
    "StateLoaded",
    "judge_replay",
    "state_loaded",
]

ENTERS = ("torch", *OTHERS, "batch")


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
        if files := [text for kind, text in changed if kind == "file"]:  # of settings, where such things are written
            why = f"{'; '.join(files[:4])}; other options of the optimizer{lrs}"
            return Ruling(verdict=ReplayVerdict.CODE, why=why, evidence=evidence)
        return Ruling(verdict=ReplayVerdict.STATE, why=f"other options of the optimizer{lrs}", evidence=evidence)
    if parts[0] in ENTERS and replays_agree is False:
        origin = "one checkpoint" if place.has_checkpoint else "its beginning"
        why = f"two replays from {origin} disagree in what enters the step ({PARTS[parts[0]][1]}): it is not repeatable"
        return Ruling(verdict=ReplayVerdict.RANDOM, why=why, evidence=evidence)
    again = replays_agree is None
    if parts[0] in ("torch", *OTHERS):
        why = f"{PARTS[parts[0]][1]} {'stand' if parts[0] == 'torch' else 'stands'} elsewhere from step {first.step} on"
        return Ruling(verdict=ReplayVerdict.STATE, why=why, evidence=evidence, again=again)
    newer = tuple(text for text in unrecorded if IS_NEWER in text)
    known = bool(newer) or any(kind in ("environment", "arithmetic", "file", "data") for kind, _ in changed)
    if one.own_moved and replays_agree is not False and not known:
        why = f"the generators that the script made for itself stand elsewhere from step {first.step} on"
        return Ruling(verdict=ReplayVerdict.STATE, why=why, evidence=evidence, again=again)
    if one.set_anew and replays_agree is not False and parts[0] != "batch":
        why = f"at step {first.step} the models are set otherwise than in the record (training or evaluation, dropout, frozen "
        why += "weights, autocast, threads)"
        if told := [text for kind, text in changed if kind in ("environment", "arithmetic", "file")]:  # of which this may come
            return Ruling(verdict=ReplayVerdict.CODE, why=f"{'; '.join(told[:4])}; {why}", evidence=evidence)
        return Ruling(verdict=ReplayVerdict.STATE, why=why, evidence=evidence, again=again)
    if one.became_another and one.drawn:
        return Ruling(verdict=ReplayVerdict.STATE, why=_drawn_within(one), evidence=evidence, again=again)
    if parts[0] == "batch":
        same = " (as many micro-batches)" if first.record.batches == first.other.batches else ""
        why = f"another batch at step {first.step}{same}"
        if one.became_another:
            why = f"the batch of step {first.step} was handed over as in the record, and entered the model otherwise"
        return Ruling(verdict=ReplayVerdict.DATA, why=why, evidence=(*evidence, *newer[:4]), again=again)
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
        return Ruling(verdict=ReplayVerdict.STATE, why=_drawn_within(one), evidence=evidence)
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


def _drawn_within(one: PrintComparison) -> str:
    assert one.first is not None
    return f"random numbers were drawn otherwise, or seeded, within step {one.first.step}: {one.drawn} tell"


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
