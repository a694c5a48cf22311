"""What a replay proves: a table of rows, each a condition and a verdict with its words; the first row that fits is the answer.

A row looks at which part of which step differs first (`chronicle/prints/compared.py`), at what is known to have changed since
the record, at what the guard found when the checkpoint was loaded, and whether two plays agree. What is known to have changed
comes before what it explains: code before all, settings before all but other batches. Where something differs and no change is
known, there is a second play. Where everything that was compared is equal, the result is another one, and two plays agree, the
verdict is "unexplained", with what no record holds: from one machine alone nobody can tell more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from chronicle.journal.events import GuardVerdict
from chronicle.prints.compared import DATA, GENERATORS, PARTS, Comparison, PrintDifference, Row
from chronicle.resume.checks.check import Outcome


class ReplayVerdict(StrEnum):
    """The verdicts of a replay."""

    REPRODUCED = "reproduced"
    DATA = "data differ"
    CODE = "code, packages or settings differ"
    STATE = "state differs"
    RANDOM = "not deterministic"
    UNEXPLAINED = "unexplained"
    NOT_COMPARED = "not compared"


V = ReplayVerdict
PLAYED_TWICE = (V.DATA, V.STATE, V.UNEXPLAINED)
SETTINGS = ("environment", "arithmetic", "library", "file")
STATE_IN_MEMORY, MOMENTS = "M1", "optimizer moments"
LATE = 2  # steps after which a difference in the moments no longer rounds away
MOST_UNLIKE = 3
NOT_RECORDED = (
    "no record holds: state that the checkpoint lacks, generators that the script made for itself, how its models are set "
    "(evaluation, frozen weights), files that it reads as it trains, answers of the network and of other programs, the clock"
)
ANOTHER_NODE = "take the step again on another node: where it is as recorded, or another result still, the node is what differs"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLoaded:
    """What a replay's guard found when its checkpoint was loaded, beside what was in memory at the save.

    `unlike`: what differs, in words. `compared`: the optimizer's moments were, or there are none.
    """

    unlike: tuple[str, ...] = ()
    compared: bool = True


def state_loaded(verdicts: Sequence[GuardVerdict]) -> StateLoaded:
    """Read it from the guard's verdicts of the replay."""
    unlike: dict[str, None] = {}
    is_compared = False
    for verdict in verdicts:
        for check in verdict.checks:
            name, then, now = check["name"], check.get("expected", "?"), check.get("found", "?")
            if check.get("code") == STATE_IN_MEMORY and check.get("outcome") == Outcome.DIFFERENT:
                unlike[f"{name}: {then} at the save, {now} after the load"] = None
            if name == MOMENTS or (name == "parameters with state" and then == now == "0"):
                is_compared = True
        # a warning lists what differs and what was not compared: the rest of the record is equal
        is_recorded = verdict.verdict == "warned" and verdict.basis not in ("", "none", "fresh")
        if is_recorded and all(one["name"] != MOMENTS for one in verdict.not_compared):
            is_compared = True
    return StateLoaded(unlike=tuple(unlike)[:MOST_UNLIKE], compared=is_compared)


# ---- what the rows look at ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCase(Comparison):
    """One comparison and what is known beside it. `changed` has one kind more: `data`, a file that is none of settings."""

    plays_agree: bool | None = None  # whether a second play tells the same; None: there was none
    facts_known: bool = True  # both launches said what they were made by
    has_checkpoint: bool = True  # else it began as the launch did
    load: StateLoaded = StateLoaded()

    @property
    def at(self) -> PrintDifference:
        """The first difference; rows that ask for it come after those without one."""
        assert self.first is not None
        return self.first

    @property
    def settings(self) -> str:
        """Which settings have changed, in words."""
        return self.named(*SETTINGS)

    @property
    def began_anew(self) -> bool:
        """Whether the launch made other weights by itself."""
        return self.begins_equal is False and not self.has_checkpoint

    @property
    def enters(self) -> bool:
        """Whether what differs first enters the step."""
        return self.part in ("options", *GENERATORS, *DATA)

    @property
    def set_otherwise(self) -> str:
        """What is set otherwise than in the record when the step begins, in words; "" where nothing is."""
        if self.part == "options":
            then, now = self.at.record.lr, self.at.other.lr
            lrs = f": LR {then:g} in the record, {now:g} in the replay" if then != now else ""
            return f"other options of the optimizer{lrs}"
        if self.part in GENERATORS:
            verb = "stand" if self.part == "torch" else "stands"
            return f"{PARTS[self.part][1]} {verb} elsewhere from step {self.at.step} on"
        return ""

    def doubts(self) -> Iterator[str]:
        """What may be the cause as well, because it differs in an unknown way or was not compared."""
        yield from (text for kind, text in self.changed if kind == "doubt")
        if self.plays_agree is None:
            yield "it may not be repeatable (no second replay told)"
        without_effect = f"without effect in {len(self.steps) - 1} steps"
        yield from (f"{text} ({without_effect})" for text in self.load.unlike)
        if "torch" in self.unrestored:
            yield f"torch's generators stand elsewhere ({without_effect})"
        if not self.load.compared:
            yield "the checkpoint may hold other moments than the training had (they were not compared at its load)"
        if self.begins_equal is None and (self.has_checkpoint or len(self.steps) == 1):
            yield "it may have begun with other weights than the training had (no print of them in the record)"
        if not self.facts_known:
            yield "the code may have changed (no `prints.json` of the launch)"
        yield from self.not_printed()
        if "batch" in self.parts and "labels" not in self.parts:
            yield "labels, which do not enter the model, may be others"


    def not_printed(self) -> Iterator[str]:
        """What no print tells of the steps that were compared."""
        for part in ("options", "torch", "batch", "gradient", "weights"):
            if part not in self.parts.union(self.unrestored):
                yield f"{PARTS[part][1]}: not in every print"
        if unprinted := max(rank.unprinted for rank in self.ranks):
            yield f"{unprinted} steps between have no print (`CHRONICLE_PRINTS=every`)"


# ---- the words of the rows ---------------------------------------------------------------------------------------------


def _why_nothing_was_compared(case: ReplayCase) -> str:
    if missing := _missing(case):
        return f"the replay took no step that the record has a print of (the first is {missing})"
    return "the record has no print of these steps"


def _missing(case: ReplayCase) -> int:
    return min((rank.missing for rank in case.ranks if rank.missing), default=0)


def _why_reproduced(case: ReplayCase) -> str:
    number = len(case.steps)
    named = ", ".join(PARTS[part][1] for part in PARTS if part in case.parts)
    return f"{number} step{'' if number == 1 else 's'}, every print equal: {named}"


def _why_enters_vary(case: ReplayCase) -> str:
    if case.began_anew:
        return (
            "the launch begins with other weights every time (what they are made from is not seeded): only steps after a "
            "checkpoint can be taken again"
        )
    begin = "one checkpoint" if case.has_checkpoint else "its beginning"
    return f"two replays from {begin} disagree in what enters the step ({PARTS[case.part][1]}): it is not repeatable"


def _settings(case: ReplayCase) -> str:
    return "; ".join(filter(None, (case.settings, case.set_otherwise)))


def _another_batch(case: ReplayCase) -> str:
    same = " (as many micro-batches)" if case.at.record.batches == case.at.other.batches else ""
    why = f"another batch at step {case.at.step}{same}" if case.part == "batch" else f"other labels at step {case.at.step}"
    if case.has_checkpoint and case.at.step == case.steps[0]:
        why += ", the first one: the checkpoint may not hold where its loader stood"
    if case.settings:
        why += f"; changed since: {case.settings}"
    return why


def _unexplained(case: ReplayCase) -> str:
    doubts = "; ".join(case.doubts())
    how, beside = ("compared", f"; not ruled out: {doubts}") if doubts else ("recorded", "")
    ranks = ", ".join(map(str, case.at.ranks))
    return f"everything {how} is equal, the result is not: step {case.at.step}, rank {ranks}{beside}"


# ---- the table ---------------------------------------------------------------------------------------------------------


ROWS: tuple[Row, ...] = (
    Row("no step compared", lambda case: not case.steps, V.NOT_COMPARED, _why_nothing_was_compared),
    Row("no result in the prints", lambda case: case.first is None and not case.parts & {"gradient", "weights", "loss"},
        V.NOT_COMPARED, lambda case: "the prints hold no gradient, loss or weights"),
    Row("a print is missing", lambda case: case.first is None and _missing(case), V.NOT_COMPARED,
        lambda case: f"the replay has no print of step {_missing(case)}, of which the record has one"),
    Row("equal", lambda case: case.first is None, V.REPRODUCED, _why_reproduced),
    # from here on something differs
    Row("code or packages", lambda case: case.named("code", "package"), V.CODE,
        lambda case: case.named("code", "package")),
    Row("what enters is not repeatable", lambda case: case.plays_agree is False and (case.enters or case.began_anew),
        V.RANDOM, _why_enters_vary),
    Row("other weights in the checkpoint", lambda case: case.begins_equal is False and case.has_checkpoint, V.STATE,
        lambda case: "the checkpoint does not hold the weights that the training had at this step"),
    Row("batch", lambda case: case.part in DATA and not case.began_anew, V.DATA, _another_batch),
    Row("settings", lambda case: case.settings, V.CODE, _settings),
    Row("a file of data", lambda case: case.named("data"), V.DATA, lambda case: case.named("data")),
    Row("begins with other weights", lambda case: case.began_anew, V.STATE,
        lambda case: "the launch began with other weights than it begins with now: what they are made from (a file, a seed) "
        "is another"),
    Row("set otherwise", lambda case: case.set_otherwise, V.STATE,
        lambda case: case.set_otherwise),
    # equal input, another result
    Row("state at the load", lambda case: case.load.unlike and len(case.steps) <= 1 + LATE, V.STATE,
        lambda case: f"the checkpoint does not hold what the training had: {'; '.join(case.load.unlike)}"),
    Row("random numbers within the step", lambda case: any(rank.drawn for rank in case.ranks), V.STATE,
        lambda case: f"random numbers were drawn otherwise, or seeded, within step {case.at.step}: torch's generators tell"),
    Row("arithmetic is not repeatable", lambda case: case.plays_agree is False, V.RANDOM,
        lambda case: "two replays from one place disagree: the arithmetic itself is not repeatable"),
    Row("equal but for the result", lambda case: True, V.UNEXPLAINED, _unexplained),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """The verdict, why, and the evidence, one sentence each. `again`: a second play is needed to tell."""

    verdict: ReplayVerdict
    why: str
    evidence: tuple[str, ...] = ()
    again: bool = False


def judge_replay(case: ReplayCase) -> Ruling:
    """The verdict: that of the first row that fits."""
    row = next(row for row in ROWS if row.fits(case))
    again = row.verdict in PLAYED_TWICE and case.plays_agree is None
    return Ruling(verdict=row.verdict, why=row.words(case), evidence=tuple(_evidence(case, row.verdict)), again=again)


def _evidence(case: ReplayCase, verdict: ReplayVerdict) -> Iterator[str]:
    if verdict is V.REPRODUCED:
        yield from _beside_equal_prints(case)
    if case.first is not None:
        yield f"first difference: {case.first.words}"
    yield from (f"{kind}: {text}" for kind, text in case.changed)
    if verdict is V.UNEXPLAINED:
        yield NOT_RECORDED
        yield ANOTHER_NODE


def _beside_equal_prints(case: ReplayCase) -> Iterator[str]:
    yield from case.not_printed()
    if any(rank.entered_before for rank in case.ranks):
        yield f"step {case.steps[0]}: the model was called between the step before and the save; gradient and weights are equal"
    for part in case.unrestored:
        yield f"{PARTS[part][1]}: not as in the record, because nobody restores it; no effect is seen"
