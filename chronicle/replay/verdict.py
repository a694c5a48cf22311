"""What a replay proves: a table of rows, each a condition and a verdict with its words; the first row that fits is the answer.

A row looks at which part of which step differs first (`compared.py`), at what is known to have changed since the record, at
what the guard found when the checkpoint was loaded, and whether two plays agree. Where everything that was compared is equal,
the result is another one, and two plays agree, the verdict is "unexplained", with what no record holds: from one machine
alone nobody can tell more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from chronicle.journal.events import GuardVerdict
from chronicle.prints.compared import OTHERS, PARTS, PrintComparison, PrintDifference
from chronicle.resume.checks.check import Outcome
from chronicle.resume.ring import SeenParts


class ReplayVerdict(StrEnum):
    """The verdicts of a replay."""

    REPRODUCED = "reproduced"
    DATA = "data differ"
    CODE = "code, packages or settings differ"
    STATE = "state differs"
    RANDOM = "not deterministic"
    UNEXPLAINED = "unexplained"
    NOT_COMPARED = "not compared"


# ---- the state that it began with, as the guard saw it -----------------------------------------------------------------

STATE_IN_MEMORY, MOMENTS = "M1", "optimizer moments"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLoaded:
    """What a replay's guard found when its checkpoint was loaded, beside what was in memory at the save.

    `unlike`: what differs, in words. `compared`: the optimizer's moments were, or there are none.
    """

    unlike: tuple[str, ...] = ()
    compared: bool = True


def state_loaded(verdicts: Sequence[GuardVerdict]) -> StateLoaded:
    """Read it from the guard's verdicts of the replay."""
    checks = [check for verdict in verdicts for check in verdict.checks]
    unlike = (
        f"{check['name']}: {check.get('expected', '?')} at the save, {check.get('found', '?')} after the load"
        for check in checks
        if check.get("code") == STATE_IN_MEMORY and check.get("outcome") == Outcome.DIFFERENT
    )
    moments = [check for check in checks if check.get("name") == MOMENTS]
    states = [check for check in checks if check.get("name") == "parameters with state"]
    has_none = bool(states) and all(check.get("expected") == check.get("found") == "0" for check in states)
    is_compared = bool(moments) or has_none or any(map(_had_equal_moments, verdicts))
    return StateLoaded(unlike=tuple(dict.fromkeys(unlike)), compared=is_compared)


def _had_equal_moments(verdict: GuardVerdict) -> bool:
    """A warning lists what differs and what was not compared: the rest of the record is equal."""
    is_recorded = verdict.basis not in ("", "none", "fresh")
    return verdict.verdict == "warned" and is_recorded and all(one["name"] != MOMENTS for one in verdict.not_compared)


# ---- what the rows look at ---------------------------------------------------------------------------------------------

ENTERS = ("torch", *OTHERS, "batch")
SETTINGS = ("environment", "arithmetic", "library", "file")
LATE = 2  # steps after which a difference in the state is in the samples at last
MOST_NAMED = 4
NOT_RECORDED = (
    "no record holds: state that the checkpoint lacks, generators that the script made for itself, files that it reads as it "
    "trains, answers of the network and of other programs, the clock"
)
ANOTHER_NODE = "take the step again on another node: where it is as recorded, or another result still, the node is what differs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCase:
    """One comparison and what is known beside it.

    `changed`: (kind, words) of what is known to differ between the launches, as `launch_facts.ChangedFact` names it; kind
    `data`: a file that is none of settings. `plays_agree`: whether a second play has the same prints; None: there was none.
    `facts_known`: both launches said what they were made by. `has_checkpoint`: else it began as the launch did.
    """

    compared: PrintComparison
    changed: Sequence[tuple[str, str]] = ()
    plays_agree: bool | None = None
    facts_known: bool = True
    load: StateLoaded = StateLoaded()
    has_checkpoint: bool = True

    @property
    def first(self) -> PrintDifference:
        """The first difference; rows that ask for it come after those without one."""
        assert self.compared.first is not None
        return self.compared.first

    @property
    def part(self) -> str:
        """The first part that differs."""
        return self.first.parts[0]

    def named(self, *kinds: str) -> str:
        """What has changed of these kinds, in words."""
        return "; ".join([text for kind, text in self.changed if kind in kinds][:MOST_NAMED])

    def began_anew_with_other_weights(self) -> bool:
        """Whether the launch made other weights by itself."""
        return self.compared.begins_equal is False and not self.has_checkpoint

    def models_set_anew(self) -> bool:
        """Whether the models were set otherwise, before anything else differs."""
        return self.compared.set_anew and self.plays_agree is not False and self.part != "batch"

    def labels_are_known(self) -> bool:
        """Whether both prints hold the labels of the first step that differs."""
        return all(SeenParts.TARGETS in side.seen for side in (self.first.record, self.first.other))

    def doubts(self) -> tuple[str, ...]:
        """What may be the cause as well, because it differs in an unknown way or was not compared."""
        return tuple(_doubts(self))


def _doubts(case: ReplayCase) -> Iterator[str]:
    one = case.compared
    yield from (text for kind, text in case.changed if kind == "doubt")
    yield from (f"{text} (without effect in {len(one.steps) - 1} steps)" for text in case.load.unlike[:3])
    if not case.load.compared:
        yield "the checkpoint may hold other moments than the training had (they were not compared at its load)"
    if one.begins_equal is None and (case.has_checkpoint or len(one.steps) == 1):
        yield "it may have begun with other weights than the training had (no print of them in the record)"
    if one.gap:
        yield f"{one.gap} steps before it have no print (`CHRONICLE_PRINTS=every`)"
    if not case.facts_known:
        yield "the code may have changed (no `prints.json` of the launch)"
    for part in ("options", "torch", "batch"):
        if part not in one.parts:
            yield f"{PARTS[part][1]}: not in the prints"
    if "batch" in one.parts and not case.labels_are_known():
        yield "labels, which do not enter the model, may be others"


# ---- the words of the rows ---------------------------------------------------------------------------------------------


def _why_nothing_was_compared(case: ReplayCase) -> str:
    if case.compared.missing:
        return f"the replay took no step that the record has a print of (the first is {case.compared.missing[0]})"
    return "the record has no print of these steps"


def _why_reproduced(case: ReplayCase) -> str:
    one = case.compared
    named = ", ".join(PARTS[part][1] for part in PARTS if part in one.parts)
    return f"{len(one.steps)} step{'' if len(one.steps) == 1 else 's'}, every print equal: {named}"


def _other_options(case: ReplayCase) -> str:
    record, other = case.first.record, case.first.other
    lrs = f": LR {record.lr:g} in the record, {other.lr:g} in the replay" if record.lr != other.lr else ""
    return f"other options of the optimizer{lrs}"


def _why_enters_vary(case: ReplayCase) -> str:
    begin = "one checkpoint" if case.has_checkpoint else "its beginning"
    return f"two replays from {begin} disagree in what enters the step ({PARTS[case.part][1]}): it is not repeatable"


def _generators_moved(case: ReplayCase) -> str:
    verb = "stand" if case.part == "torch" else "stands"
    return f"{PARTS[case.part][1]} {verb} elsewhere from step {case.first.step} on"


def _set_anew(case: ReplayCase) -> str:
    what = "training or evaluation, dropout, frozen weights, autocast, threads"
    return f"at step {case.first.step} the models are set otherwise than in the record ({what})"


def _drawn_within(case: ReplayCase) -> str:
    return f"random numbers were drawn otherwise, or seeded, within step {case.first.step}: torch's generators tell"


def _another_batch(case: ReplayCase) -> str:
    first = case.first
    same = " (as many micro-batches)" if first.record.batches == first.other.batches else ""
    why = f"another batch at step {first.step}{same}"
    if case.has_checkpoint and first.step == case.compared.steps[0]:
        why += ", the first one: the checkpoint may not hold where its loader stood"
    return why


def _where(case: ReplayCase, how: str) -> str:
    ranks = ", ".join(map(str, case.first.ranks))
    return f"everything {how} is equal, the result is not: step {case.first.step}, rank {ranks}"


# ---- the table ---------------------------------------------------------------------------------------------------------

Words = Callable[[ReplayCase], str]


class Row(NamedTuple):
    """One row: what it is about, when it fits, its verdict, its words. `again`: only a second play tells it for certain."""

    name: str
    fits: Callable[[ReplayCase], bool]
    verdict: ReplayVerdict
    why: Words
    again: bool = False


V = ReplayVerdict
ROWS: tuple[Row, ...] = (
    Row("no step compared", lambda case: not case.compared.steps, V.NOT_COMPARED, _why_nothing_was_compared),
    Row("no result in the prints",
        lambda case: case.compared.first is None and not case.compared.parts & {"gradient", "weights", "loss"},
        V.NOT_COMPARED, lambda case: "the prints hold no gradient, loss or weights"),
    Row("a print is missing", lambda case: case.compared.first is None and bool(case.compared.missing), V.NOT_COMPARED,
        lambda case: f"the replay has no print of step {case.compared.missing[0]}, of which the record has one"),
    Row("equal", lambda case: case.compared.first is None, V.REPRODUCED, _why_reproduced),
    # from here on something differs
    Row("code or packages", lambda case: bool(case.named("code", "package")), V.CODE,
        lambda case: case.named("code", "package")),
    Row("begins with other weights every time",
        lambda case: case.began_anew_with_other_weights() and case.plays_agree is False, V.RANDOM,
        lambda case: "the launch begins with other weights every time (what they are made from is not seeded): only steps "
        "after a checkpoint can be taken again"),
    Row("begins with other weights, settings",
        lambda case: case.began_anew_with_other_weights() and bool(case.named(*SETTINGS, "data")), V.CODE,
        lambda case: case.named(*SETTINGS, "data")),
    Row("begins with other weights", ReplayCase.began_anew_with_other_weights, V.STATE,
        lambda case: "the launch began with other weights than it begins with now: what they are made from (a file, a seed) "
        "is another", again=True),
    Row("other weights in the checkpoint", lambda case: case.compared.begins_equal is False, V.STATE,
        lambda case: "the checkpoint does not hold the weights that the training had at this step"),
    Row("options, a file of settings", lambda case: case.part == "options" and bool(case.named("file")), V.CODE,
        lambda case: f"{case.named('file')}; {_other_options(case)}"),
    Row("options", lambda case: case.part == "options", V.STATE, _other_options),
    Row("what enters is not repeatable", lambda case: case.part in ENTERS and case.plays_agree is False, V.RANDOM,
        _why_enters_vary),
    Row("generators", lambda case: case.part in ("torch", *OTHERS), V.STATE, _generators_moved, again=True),
    Row("models set otherwise, settings", lambda case: case.models_set_anew() and bool(case.named(*SETTINGS)), V.CODE,
        lambda case: f"{case.named(*SETTINGS)}; {_set_anew(case)}"),
    Row("models set otherwise", ReplayCase.models_set_anew, V.STATE, _set_anew, again=True),
    Row("batch", lambda case: case.part == "batch", V.DATA, _another_batch, again=True),
    # equal input, another result
    Row("settings", lambda case: bool(case.named(*SETTINGS)), V.CODE, lambda case: case.named(*SETTINGS)),
    Row("a file of data", lambda case: bool(case.named("data")), V.DATA, lambda case: case.named("data")),
    Row("state at the load", lambda case: bool(case.load.unlike) and len(case.compared.steps) <= 1 + LATE, V.STATE,
        lambda case: f"the checkpoint does not hold what the training had: {'; '.join(case.load.unlike[:3])}"),
    Row("random numbers within the step", lambda case: case.compared.drawn, V.STATE, _drawn_within),
    Row("arithmetic is not repeatable", lambda case: case.plays_agree is False, V.RANDOM,
        lambda case: "two replays from one place disagree: the arithmetic itself is not repeatable"),
    Row("played once", lambda case: case.plays_agree is None, V.UNEXPLAINED,
        lambda case: "equal input and another result: no second replay tells whether it is repeatable",
        again=True),
    Row("not everything compared", lambda case: bool(case.doubts()), V.UNEXPLAINED,
        lambda case: f"{_where(case, 'compared')}; not ruled out: {'; '.join(case.doubts())}"),
    Row("everything equal but the result", lambda case: True, V.UNEXPLAINED,
        lambda case: _where(case, "recorded")),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """The verdict, why, and the evidence, one sentence each. `again`: a second play is needed to tell."""

    verdict: ReplayVerdict
    why: str
    evidence: tuple[str, ...] = field(default=())
    again: bool = False


def judge_replay(case: ReplayCase) -> Ruling:
    """The verdict: that of the first row that fits."""
    row = next(row for row in ROWS if row.fits(case))
    again = row.again and case.plays_agree is None
    return Ruling(verdict=row.verdict, why=row.why(case), evidence=tuple(_evidence(case, row)), again=again)


def _evidence(case: ReplayCase, row: Row) -> Iterator[str]:
    if row.verdict is V.REPRODUCED:
        yield from _beside_equal_prints(case.compared)
    if case.compared.first is not None:
        yield f"first difference: {case.first.words}"
    yield from (f"{kind}: {text}" for kind, text in case.changed)
    if row.verdict is V.UNEXPLAINED:
        yield NOT_RECORDED
        yield ANOTHER_NODE


def _beside_equal_prints(one: PrintComparison) -> Iterator[str]:
    parts = ("options", "torch", "batch", "gradient", "weights")
    unseen = [PARTS[part][1] for part in parts if part not in one.parts and part not in one.unrestored]
    if unseen:
        yield f"not in every print, and so not compared: {', '.join(unseen)}"
    if one.entered_before:
        what = "gradient and weights are equal"
        yield f"step {one.steps[0]}: the model was called between the step before and the save; {what}"
    if one.unprinted:
        yield f"{len(one.unprinted)} steps between them have no print in the record"
    if one.unrestored:
        named = " and ".join(PARTS[part][1] for part in one.unrestored)
        them = "it" if len(one.unrestored) == 1 else "them"
        yield f"{named}: not as in the record, because nobody restores {them}; no effect is seen"
