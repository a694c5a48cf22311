"""Steps that are taken again, told from their prints: was it the data, the settings, or one rank?

After a crash or a rollback a launch takes steps again that an earlier launch took from the same state, on all its ranks.
Both left prints of them (`chronicle/prints/ring.py`), so the comparison needs no sandbox and costs no step: it reads two files
a rank. Which state it was is known by the weights of the prints; where the earlier launch has no print of that step, by the
checkpoint whose identity the guard recorded.

A rank is named only where every other rank was compared in the same part of the same step and is equal, and where what
differs cannot have come from another rank (`own_ranks`), or where a few of the ranks that hold the same weights stop to do so
within one launch (`replicas_apart`). Equal bits cannot be asked of every training: with three ranks or more DDP adds in another
order in the first step after a start. So losses are compared as numbers too: the rise that comes again with the same batches
is what a person wants to know. No torch here.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf, isfinite
from typing import NamedTuple

from chronicle.prints.compared import (
    DATA,
    GENERATORS,
    MOST_NAMED,
    PARTS,
    RESULT,
    Comparison,
    RankCompared,
    Row,
    compare_rank,
    differing_parts,
)
from chronicle.prints.ring import Print, SeenParts, Segment

LAST_DIGITS = 1e-4  # relative: what float32 loses in a few hundred steps of another order of sums
FAR_APART = 100.0  # so many times as far as the losses of the other ranks
SAME_RISE = 0.25  # of the size of a rise: so near it came again
TINY = 1e-12
MOST_KEPT = 2048  # steps of one rank whose losses and weights are kept
CAUSES = ("code", "package", "arithmetic", "library")
SETTINGS = ("environment", "file")  # differ between many launches, and then all ranks do


class RetakenVerdict(StrEnum):
    """What the prints of both launches say."""

    EQUAL = "equal"
    CLOSE = "equal but for the last digits"
    RANKS = "some ranks differ"
    RESULT = "the result differs"
    CODE = "code, packages or settings differ"
    DATA = "other batches"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRetaken(RankCompared):
    """One rank of both launches."""

    last_step: int = 0  # of which both have a print
    taken: tuple[int, int] = (0, 0)  # the last step of which there is a print, then and now
    begins: int = 0  # the weights that it began with now, as a digest
    hosts: tuple[str, str] = ("", "")  # then and now
    machines: tuple[str, str] = ("", "")  # what computes there, in words
    labels: bool = True  # those of every step were compared, by their name
    other_batch: int | None = None  # the first step with another batch, behind `apart` too
    losses: Mapping[int, tuple[float, float]] = field(default_factory=dict)  # by step: then and now
    weights: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # their digests, alike


class Rise(NamedTuple):
    """An incident of the earlier launch: its onset, and the step and size of its peak above the level before."""

    onset: int
    peak: int
    excess: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RetakenCase(Comparison):
    """All ranks, and what is known beside their prints."""

    ranks: Sequence[RankRetaken]
    earlier: int
    start: int  # steps completed where both began
    ranks_then: int = 0  # as the rings say
    ranks_now: int = 0
    skipped: bool = False  # a rollback between them skips batches, on purpose
    rise: Rise | None = None  # an incident of the earlier launch in these steps

    @property
    def equal_before(self) -> int:
        """How many steps were compared and equal before the first one that differs, on every rank that differs."""
        return min((len(rank.steps) - 1 for rank in self.ranks if rank.apart is not None), default=0)

    @property
    def is_close_at_once(self) -> bool:
        """Whether the first step differs, and all losses in their last digits alone: sums in another order, seldom a fault."""
        is_close = self.loss_apart is not None and self.loss_apart <= LAST_DIGITS
        return self.first is not None and self.equal_before < 1 and is_close

    @property
    def other_batch(self) -> int | None:
        """The first step with another batch on some rank."""
        return min((rank.other_batch for rank in self.compared if rank.other_batch is not None), default=None)

    @property
    def is_of_data(self) -> bool:
        """Whether a batch is what differs first, but for the last digits of a sum."""
        if self.first is not None and self.part in (*DATA, *GENERATORS):
            return not set(DATA).isdisjoint(self.first.parts)
        return self.other_batch is not None and self.is_close_at_once

    @property
    def is_of_result(self) -> bool:
        """Whether a result differs in the first step that differs: a generator alone is none."""
        return self.first is not None and not set(RESULT).isdisjoint(self.first.parts)

    @property
    def loss_apart(self) -> float | None:
        """By how much a loss with the same batch differs at most, relative to itself; None where none was compared."""
        until = self.other_batch or inf
        apart = [_apart(*pair) for rank in self.ranks for step, pair in rank.losses.items() if step < until]
        return max(apart, default=None)

    def same_batches(self, until: float) -> bool:
        """Whether the batches of all ranks were compared up to this step, and are equal."""
        return "batch" in self.parts and (self.other_batch or inf) > until

    def is_whole(self, until: int) -> bool:
        """Whether all ranks were compared, and had the same batches up to this step."""
        return len(self.compared) == self.ranks_now and self.same_batches(until)

    @property
    def are_drawn_alike(self) -> bool:
        """Whether torch's generators stand as they stood on all ranks: what one draws (a layer left out) is in its own loss."""
        apart = [rank.apart.parts for rank in self.ranks if rank.apart is not None]
        return "torch" not in self.unrestored and not any("torch" in parts for parts in apart)

    @property
    def batches(self) -> str:
        """What is known of the batches of all steps, in words."""
        if "batch" not in self.parts:
            return "batches not compared"
        return f"other batches from step {self.other_batch:,} on" if self.other_batch else "the same batches"

    @property
    def came_again(self) -> bool | None:
        """Whether the rise came again, with the same batches; None where nobody can tell."""
        if self.rise is None or not self.same_batches(self.rise.peak):
            return None
        for rank in self.ranks:
            if self.rise.peak in rank.losses:
                then, now = rank.losses[self.rise.peak]
                return now == then or abs(now - then) <= SAME_RISE * abs(self.rise.excess)
        return None


def _apart(then: float, now: float) -> float:
    """The difference relative to the larger of both; infinite where only one is finite."""
    if not (isfinite(then) and isfinite(now)):
        return 0.0 if isfinite(then) == isfinite(now) else inf
    return abs(now - then) / max(abs(then), abs(now), TINY)


def retake_rank(
    rank: int,
    then: Segment,
    now: Segment,
    *,
    hosts: tuple[str, str] = ("", ""),
    machines: tuple[str, str] = ("", ""),
) -> RankRetaken:
    """Compare the steps that one rank took in both segments. `now` begins where the comparison begins."""
    assert now.begins is not None
    start = now.begins.step
    begun = {} if then.begins is None else {then.begins.step: then.begins}
    until = max(now.steps, default=start)
    found = compare_rank(rank, {**begun, **then.steps}, now.steps, start=start, until=until, begins=now.begins)
    other_batch = None
    losses, weights, labels = {}, {}, True
    common = [step for step in sorted(then.steps) if start < step and step in now.steps]
    for step in common[:MOST_KEPT]:
        one, other = then.steps[step], now.steps[step]
        seen = one.seen & other.seen
        labels = labels and SeenParts.LABELS in seen
        if SeenParts.LOSS in seen:
            losses[step] = (one.loss, other.loss)
        if SeenParts.WEIGHTS in seen:
            weights[step] = (one.weights, other.weights)
        if other_batch is None and not set(DATA).isdisjoint(differing_parts(one, other)):
            other_batch = step
    return RankRetaken(
        **{name: getattr(found, name) for name in RankCompared.__slots__},
        last_step=max(common, default=0),
        taken=(max(then.steps, default=start), until),
        begins=now.begins.weights,
        hosts=hosts,
        machines=machines,
        labels=labels,
        other_batch=other_batch,
        losses=losses,
        weights=weights,
    )


def find_segment(segments: Sequence[Segment], begins: Print, *, is_known: bool) -> Segment | None:
    """The newest of these segments that goes on from the state with which another began, by the weights.

    `is_known`: the journal says that this launch was there, so one whose print of that step is missing, or another, counts too.
    """
    going_on = [one for one in reversed(segments) if max(one.steps, default=0) > begins.step]
    for one in going_on:
        own = one.steps.get(begins.step)
        if one.begins is not None and one.begins.step == begins.step:
            own = one.begins
        if own is not None and SeenParts.WEIGHTS in own.seen & begins.seen and own.weights == begins.weights:
            return one
    return going_on[0] if is_known and going_on else None


def rise_in(rises: Iterable[Rise], ranks: Sequence[RankRetaken]) -> Rise | None:
    """The first of these rises whose onset and peak lie in the steps of which both launches have a print."""
    steps = next((rank.losses for rank in ranks if rank.losses), {})
    first, last = min(steps, default=0), max(steps, default=0)
    return min((rise for rise in rises if first <= rise.onset and rise.peak <= last), default=None)


# ---- which ranks -------------------------------------------------------------------------------------------------------


class Odd(NamedTuple):
    """Ranks that are named, none where nobody can tell which: the step, and the sentence."""

    step: int
    ranks: tuple[int, ...]
    words: str


def replicas_apart(case: RetakenCase) -> Odd | None:
    """The few ranks that held the same weights as the others and left them within one launch; None: none did.

    Where each goes its own way, that is how they are trained. Of two halves nobody can tell who left whom.
    """
    if len(case.compared) != case.ranks_now:
        return None
    steps = sorted(set.intersection(*(set(rank.weights) for rank in case.ranks)))
    for place, launch in enumerate((f"launch {case.earlier}", "this launch")):
        held = [Counter(rank.weights[step][place] for rank in case.ranks) for step in steps]
        at = next((at for at, weights in enumerate(held) if len(weights) > 1), 0)
        usual = held[at].most_common() if at else []  # else they never were the same
        if len(usual) != 2 or usual[0][1] == usual[1][1]:
            continue
        ranks = tuple(rank.rank for rank in case.ranks if rank.weights[steps[at]][place] == usual[1][0])
        verb, its = ("holds", "it held") if len(ranks) == 1 else ("hold", "they held")
        words = (
            f"rank {_numbers(ranks)} of {launch} {verb} other weights than the other {usual[0][1]:,} from step {steps[at]:,} "
            f"on, and {its} the same before: look at {_nodes(case, ranks, place)}"
        )
        return Odd(steps[at], ranks, words)
    return None


def lone_losses(case: RetakenCase) -> Odd | None:
    """The first step at which a loss is another number on some ranks and the same on all others; None where there is none.

    It is computed before gradients are exchanged, so it tells where the fault was, also where no two launches have equal bits.
    """
    are_told = bool(case.ranks) and case.are_drawn_alike
    steps = sorted(set.intersection(*(set(rank.losses) for rank in case.ranks))) if are_told else []
    for step in steps:
        apart = {rank.rank: _apart(*rank.losses[step]) for rank in case.ranks}
        far = tuple(rank for rank, size in apart.items() if size > LAST_DIGITS)
        if not far:
            continue
        rest = max((size for rank, size in apart.items() if rank not in far), default=inf)
        if step == steps[0] or not case.is_whole(step) or rest * FAR_APART > min(apart[rank] for rank in far):
            return None
        words = (
            f"the loss of rank {_numbers(far)} is another one at step {step:,} (by {max(apart.values()):.1g} of it), with the "
            f"same batch; those of the other ranks are the same: look at {_nodes(case, far)}{_or_labels(case, far)}"
        )
        return Odd(step, far, words)
    return None


def own_ranks(case: RetakenCase) -> Odd | None:
    """The ranks that differ by themselves; None where nobody can tell.

    The parts are looked at in the order in which a step makes them. The others must have been compared in the same part of
    the same step, and be equal. A gradient is a sum over ranks: one that differs on some ranks alone arose there only where
    all held the same weights until then, else another rank's share may lie in their part. What a rank draws by itself is in its
    loss, and in the gradients of all.
    """
    first = case.first
    if first is None or case.equal_before < 1 or not case.is_whole(first.step):
        return None
    tells = {"loss": case.are_drawn_alike, "gradient": _are_replicas(case, first.step), "weights": "gradient" in case.parts}
    for part, does_tell in tells.items():
        apart = [rank.apart for rank in case.ranks if rank.apart is not None and rank.apart.step == first.step]
        ranks = tuple(one.ranks[0] for one in apart if part in one.parts)
        if not ranks or part not in case.parts or any(rank.last_step < first.step for rank in case.ranks):
            continue
        if not does_tell or len(ranks) == len(case.ranks):
            return None
        num_others = len(case.ranks) - len(ranks)
        others = "the other rank is" if num_others == 1 else f"the other {num_others:,} ranks are"
        verb, its = ("differs", "its batch was") if len(ranks) == 1 else ("differ", "their batches were")
        words = (
            f"rank {_numbers(ranks)} {verb} from step {first.step:,} on ({PARTS[part][1]}); {its} equal, and {others} equal to "
            f"the last bit: look at {_nodes(case, ranks)}{_or_labels(case, ranks)}{_since(case, *SETTINGS)}"
        )
        return Odd(first.step, ranks, words)
    return None


def _are_replicas(case: RetakenCase, step: int) -> bool:
    """Whether all ranks held the same weights right before this step, in both launches: their gradients are one sum."""
    known = [{one: held for one, held in rank.weights.items() if one < step} for rank in case.ranks]
    held = {weights[max(weights)] if weights else rank.rank for rank, weights in zip(case.ranks, known, strict=True)}
    return len(held) == 1


def _or_labels(case: RetakenCase, ranks: Sequence[int]) -> str:
    """The doubt about these ranks where it is not known that labels were compared."""
    known = all(rank.labels for rank in case.ranks if rank.rank in ranks)
    return "" if known else ", or at labels that do not come with the batch, which were not compared"


def _since(case: RetakenCase, *kinds: str) -> str:
    """What of these kinds has changed between the launches, in brackets; "" for nothing."""
    changed = case.named(*kinds)
    return f" (changed since launch {case.earlier}: {changed})" if changed else ""


def _nodes(case: RetakenCase, ranks: Sequence[int], place: int | None = None) -> str:
    """Where these ranks are; `place`: in one of the two launches alone."""
    found = []
    for rank in case.ranks:
        then, now = rank.hosts if place is None else (rank.hosts[place],) * 2
        node = f"node {now}" if then == now else f"node {then} then, {now} now"
        if rank.rank in ranks:
            found.append(f"rank {rank.rank} on {node}")
    return ", ".join(found[:MOST_NAMED])


def _numbers(ranks: Sequence[int]) -> str:
    more = len(ranks) - MOST_NAMED
    return ", ".join(map(str, ranks[:MOST_NAMED])) + (f" and {more:,} more" if more > 0 else "")


# ---- the rows ----------------------------------------------------------------------------------------------------------


def _steps(case: RetakenCase) -> str:
    """Which steps were taken again, and by whom."""
    first = min(rank.steps[0] for rank in case.compared)
    last = max(rank.last_step for rank in case.compared)
    steps = f"step {first:,}" if first == last else f"steps {first:,}–{last:,}"
    return f"{steps} taken again"


def _on_ranks(case: RetakenCase) -> str:
    number = len(case.compared)
    if number < case.ranks_now:
        return f"on {number:,} of {case.ranks_now:,} ranks (of the others nothing was compared)"
    return f"on {number:,} rank{'' if number == 1 else 's'}"


def _equal(case: RetakenCase) -> str:
    beside = "" if case.same_batches(0) else f" ({case.batches})"
    return f"{_steps(case)}: equal {_on_ranks(case)}{beside}{_of_rise(case)}"


def _close(case: RetakenCase) -> str:
    size = f", but for {case.loss_apart:.0e} of it" if case.loss_apart else ""
    bits = f"other bits {_from(case)}, {PARTS[case.part][1]}"
    return f"{_steps(case)} {_on_ranks(case)}: {case.batches} and the same loss{size} ({bits}){_of_rise(case)}"


def _from(case: RetakenCase) -> str:
    assert case.first is not None
    return f"from step {case.first.step:,} on"


def _of_rise(case: RetakenCase) -> str:
    """Whether the rise came again."""
    if case.rise is None or case.came_again is None:
        return ""
    if case.came_again:
        return f"; the rise of step {case.rise.onset:,} came again: it is data × weights"
    return f"; the rise of step {case.rise.onset:,} did not come again, with the same batches: it is not the data alone"


def _other_weights(case: RetakenCase) -> str:
    """Ranks that held the same weights and did not once more: a checkpoint has those of one of them."""
    apart = [rank.rank for rank in case.ranks if rank.begins_equal is False]
    if len(apart) == len(case.ranks):
        return f"not comparable: the weights of step {case.start:,} are not those that launch {case.earlier} had"
    said = f"not comparable: rank {_numbers(apart)} had other weights at step {case.start:,} of launch {case.earlier} than now"
    are_replicas = len({rank.begins for rank in case.ranks}) == 1
    return f"{said}, when all ranks have the same: replicas had drifted apart" if are_replicas else said


def _other_options(case: RetakenCase) -> str:
    assert case.first is not None
    then, now = case.first.record.lr, case.first.other.lr
    options = f"LR {then:g} then, {now:g} now" if then != now else "other options"
    equal = [PARTS[name][1] for name in ("batch", "gradient", "loss") if name in case.parts - set(case.first.parts)]
    beside = f"; until then equal: {', '.join(equal)} of step {case.first.step:,}" if equal else ""
    return f"not comparable {_from(case)}: {options}{beside}"


def _other_batches(case: RetakenCase) -> str:
    assert case.first is not None
    if not set(DATA).isdisjoint(case.first.parts):
        step, ranks, before = case.first.step, case.first.ranks, ""
    else:
        step = case.other_batch or case.first.step
        ranks = tuple(rank.rank for rank in case.compared if rank.other_batch == step)
        before = f" (other bits before it: {PARTS[case.part][1]})"
    where = "" if len(ranks) == len(case.compared) else f", on rank {_numbers(ranks)}"
    what = "labels" if case.part == "labels" else "batches"
    return f"not the same {what} from step {step:,} on{where}{before}{_since(case, *CAUSES, *SETTINGS)}"


def _changed(case: RetakenCase) -> str:
    moved = f" ({PARTS[case.part][1]} stand elsewhere, too)" if case.part in GENERATORS else ""
    return f"another result {_from(case)}; changed since launch {case.earlier}: {case.named(*CAUSES, *SETTINGS)}{moved}"


def _result(case: RetakenCase) -> str:
    assert case.first is not None
    where = f"rank {_numbers(case.first.ranks)}" if len(case.first.ranks) < case.ranks_now else "every rank"
    said = f"another result {_from(case)}, {where} ({PARTS[case.part][1]}), {case.batches}"
    if case.loss_apart is not None:
        said += f"; the loss differs by at most {case.loss_apart:.1g} of it"
    said += _of_rise(case)
    if "torch" in case.unrestored:
        said += "; torch's generators stand elsewhere, without effect before it"
    if case.equal_before < 1:
        return f"{said}. State that no print holds (moments) may be another, or the arithmetic does not repeat itself"
    spread = ", which the exchange of gradients spread" if case.ranks_now > 1 else ""
    return (
        f"{said}. {case.equal_before:,} equal before it: the arithmetic does not repeat itself, or one of the two launches "
        f"had a fault{spread}"
    )


V = RetakenVerdict
# Of a row that names ranks `fits` gives them with their sentence (`Odd`).
ROWS: tuple[Row, ...] = (
    Row("another number of ranks", lambda case: case.ranks_then != case.ranks_now, V.NOT_COMPARABLE,
        lambda case: f"not comparable: {case.ranks_then} ranks took these steps in launch {case.earlier}, and {case.ranks_now} "
        "do now"),
    Row("other weights to begin with", lambda case: case.begins_equal is False, V.NOT_COMPARABLE, _other_weights),
    Row("a replica strayed", replicas_apart, V.RANKS, str),
    Row("no result in the prints", lambda case: case.first is None and not case.parts & {"gradient", "weights", "loss"},
        V.NOT_COMPARABLE, lambda case: "not comparable: the prints hold no gradient, loss or weights"),
    Row("equal", lambda case: case.first is None, V.EQUAL, _equal),
    Row("options", lambda case: case.part == "options", V.NOT_COMPARABLE, _other_options),
    Row("batches were skipped", lambda case: case.skipped and (case.is_of_data or case.part in GENERATORS),
        V.NOT_COMPARABLE, lambda case: "not comparable: batches were skipped by the rollback"),
    Row("batch", lambda case: case.is_of_data, V.DATA, _other_batches),
    Row("the loss of some ranks", lone_losses, V.RANKS, str),
    Row("the last digits", lambda case: case.is_close_at_once, V.CLOSE, _close),
    Row("something has changed", lambda case: case.named(*CAUSES) and case.is_of_result, V.CODE, _changed),
    Row("generators", lambda case: case.part in GENERATORS, V.NOT_COMPARABLE,
        lambda case: f"not comparable {_from(case)}: {PARTS[case.part][1]} stand elsewhere"),
    Row("some ranks", own_ranks, V.RANKS, str),
    Row("settings have changed", lambda case: case.named(*SETTINGS), V.CODE, _changed),
    Row("the result alone", lambda case: True, V.RESULT, _result),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Retaken:
    """The verdict and its sentence, and the step and ranks that it is about."""

    verdict: RetakenVerdict
    why: str
    step: int
    ranks: tuple[int, ...]


def judge_retaken(case: RetakenCase) -> Retaken:
    """The verdict: that of the first row that fits."""
    for row in ROWS:
        found = row.fits(case)
        if isinstance(found, Odd):
            return Retaken(verdict=row.verdict, why=found.words, step=found.step, ranks=found.ranks)
        if found:
            break
    first = case.first
    step, ranks = (case.start, ()) if first is None else (first.step, first.ranks)
    return Retaken(verdict=row.verdict, why=row.words(case), step=step, ranks=ranks)
