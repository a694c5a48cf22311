"""Steps that are taken again, told from their prints: was it the data, the settings, or one rank?

After a crash or a rollback a launch takes steps again that an earlier launch took from the same state, on all its ranks.
Both left prints of them (`chronicle/resume/ring.py`), so the comparison needs no sandbox and costs no step: it reads two files
a rank. Which state it was is known by the weights of the prints; where the earlier launch has no print of that step, by the
checkpoint whose identity the guard recorded.

A rank is named only where every other rank was compared in the same part of the same step and is equal, and where what
differs cannot have come from another rank (`own_ranks`), or where a few of the ranks that hold the same weights stop to do so
within one launch (`parted`). Equal bits cannot be asked of every training: with three ranks or more DDP adds in another order
in the first step after a start. So losses are compared as numbers too: the rise that comes again with the same batches is what
a person wants to know. No torch here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf, isfinite
from typing import NamedTuple

from chronicle.prints.compared import OTHERS, PARTS, PrintDifference, compare_prints
from chronicle.resume.ring import Print, SeenParts, Segment

MOST_NAMED = 4
GENERATORS = ("torch", *OTHERS)
LAST_DIGITS = 1e-4  # relative: what float32 loses in a few hundred steps of another order of sums
FAR_APART = 100.0  # so many times as far as the losses of the other ranks
SAME_RISE = 0.25  # of the size of a rise: so near it came again
TINY = 1e-12
MOST_LOSSES = 4096  # steps of one rank whose losses are kept


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
class RankRetaken:
    """One rank of both launches."""

    rank: int
    count: int = 0  # steps that were compared, to the first that differs
    first_step: int = 0  # of which both have a print
    last_step: int = 0
    taken: tuple[int, int] = (0, 0)  # the last step of which there is a print, then and now
    parts: frozenset[str] = frozenset()  # that were compared in each of these steps
    begins_equal: bool | None = None  # the weights before the first step; None: not printed
    begins: int = 0  # these weights now, as a digest
    apart: PrintDifference | None = None  # the first step that differs
    unrestored: bool = False  # torch's generators stand elsewhere from the first step on, and had no effect before `apart`
    hosts: tuple[str, str] = ("", "")  # then and now
    machines: tuple[str, str] = ("", "")  # what computes there, in words
    other_batch: int | None = None  # the first step with another batch, behind `apart` too
    losses: Mapping[int, tuple[float, float]] = field(default_factory=dict)  # by step: then and now
    # Where its weights are no longer those of the first rank, then and now: the step, and their digest
    strayed: tuple[tuple[int, int] | None, tuple[int, int] | None] = (None, None)


class Rise(NamedTuple):
    """An incident of the earlier launch: its onset, and the step and size of its peak above the level before."""

    onset: int
    peak: int
    excess: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RetakenCase:
    """All ranks, and what is known beside their prints. `changed`: (kind, words), as `launch_facts.ChangedFact` names it."""

    earlier: int
    start: int  # steps completed where both began
    ranks: Sequence[RankRetaken]
    ranks_then: int = 0  # as the rings say
    ranks_now: int = 0
    changed: Sequence[tuple[str, str]] = ()
    skipped: bool = False  # a rollback between them skips batches, on purpose
    rise: Rise | None = None  # an incident of the earlier launch in these steps

    @property
    def compared(self) -> Sequence[RankRetaken]:
        """Ranks of which a step was compared."""
        return [rank for rank in self.ranks if rank.count]

    @property
    def apart(self) -> PrintDifference | None:
        """The first step that differs on any rank; `ranks` has all that differ there in the same part first."""
        found = [rank.apart for rank in self.ranks if rank.apart is not None]
        if not found:
            return None
        first = min(found, key=lambda one: (one.step, _order(one)))
        ranks = [one.ranks[0] for one in found if (one.step, one.parts[0]) == (first.step, first.parts[0])]
        return PrintDifference(
            step=first.step, parts=first.parts, ranks=tuple(ranks), record=first.record, other=first.other
        )

    @property
    def part(self) -> str:
        """The part that differs first; "" where none does."""
        return "" if self.apart is None else self.apart.parts[0]

    @property
    def differs_at_once(self) -> bool:
        """Whether the first step that was compared differs: sums in another order do so, a fault seldom."""
        return self.apart is not None and self.equal_before < 1

    @property
    def equal_before(self) -> int:
        """How many steps were compared and equal before the first one that differs, on every rank that differs."""
        return min((rank.count - 1 for rank in self.ranks if rank.apart is not None), default=0)

    @property
    def batches_part(self) -> int | None:
        """The first step with another batch on some rank."""
        return min((rank.other_batch for rank in self.compared if rank.other_batch is not None), default=None)

    @property
    def is_of_data(self) -> bool:
        """Whether a batch is what differs first, but for the last digits of a sum."""
        if self.part in ("batch", *GENERATORS) and self.apart is not None:
            return "batch" in self.apart.parts
        return self.batches_part is not None and self.differs_at_once and is_close(self)

    @property
    def loss_apart(self) -> float | None:
        """By how much a loss with the same batch differs at most, relative to itself; None where none was compared."""
        until = self.batches_part or inf
        apart = [_apart(*pair) for rank in self.ranks for step, pair in rank.losses.items() if step < until]
        return max(apart, default=None)

    def same_batches(self, until: int) -> bool:
        """Whether the batches of all ranks were compared up to this step, and are equal."""
        is_known = all("batch" in rank.parts for rank in self.compared)
        return is_known and all(rank.other_batch is None or rank.other_batch > until for rank in self.compared)

    def is_whole(self, until: int) -> bool:
        """Whether all ranks were compared and had the same batches up to this step, and no generator stands elsewhere."""
        if any(rank.unrestored or (rank.apart is not None and "torch" in rank.apart.parts) for rank in self.ranks):
            return False
        return len(self.compared) == self.ranks_now and self.same_batches(until)

    @property
    def batches(self) -> str:
        """What is known of the batches of all steps, in words."""
        if any("batch" not in rank.parts for rank in self.compared):
            return "batches not compared"
        part = self.batches_part
        return "the same batches" if part is None else f"other batches from step {part:,} on"

    @property
    def came_again(self) -> bool | None:
        """Whether the rise came again, with the same batches; None where nobody can tell."""
        peak = 0 if self.rise is None else self.rise.peak
        pair = next((rank.losses[peak] for rank in self.ranks if peak in rank.losses), None)
        if self.rise is None or pair is None or not self.same_batches(peak):
            return None
        then, now = pair
        return now == then or abs(now - then) <= SAME_RISE * abs(self.rise.excess)

    def named(self, *kinds: str) -> str:
        """What has changed of these kinds, in words."""
        return "; ".join([words for kind, words in self.changed if kind in kinds][:MOST_NAMED])


def _order(apart: PrintDifference) -> int:
    return tuple(PARTS).index(apart.parts[0])


def _apart(then: float, now: float) -> float:
    """The difference relative to the larger of both; infinite where only one is finite."""
    if not (isfinite(then) and isfinite(now)):
        return 0.0 if isfinite(then) == isfinite(now) else inf
    return abs(now - then) / max(abs(then), abs(now), TINY)


def compare_rank(
    rank: int,
    then: Segment,
    now: Segment,
    *,
    first: tuple[Segment, Segment],
    hosts: tuple[str, str] = ("", ""),
    machines: tuple[str, str] = ("", ""),
) -> RankRetaken:
    """Compare the steps that one rank took in both segments. `now` begins where the comparison begins.

    `first`: both segments of the first rank, whose weights a replica keeps.
    """
    assert now.begins is not None
    start = now.begins.step
    record = {**({then.begins.step: then.begins} if then.begins is not None else {}), **then.steps}
    begins, until = {rank: now.begins}, max(now.steps, default=start)
    found = compare_prints(
        {rank: record}, {rank: now.steps}, start=start, until=until, begins=begins, by_effect=True
    )
    common = [step for step in then.steps if step > start and step in now.steps]
    return RankRetaken(
        rank=rank,
        count=len(found.steps),
        first_step=min(common, default=0),
        last_step=max(common, default=0),
        taken=(max(then.steps, default=start), until),
        parts=found.parts,
        begins_equal=found.begins_equal,
        begins=now.begins.weights,
        apart=found.first,
        unrestored="torch" in found.unrestored,
        hosts=hosts,
        machines=machines,
        other_batch=_first_other_batch(then, now),
        losses=_losses(then, now),
        strayed=(strayed(then, first[0]), strayed(now, first[1])),
    )


def _first_other_batch(then: Segment, now: Segment) -> int | None:
    for step in sorted(then.steps.keys() & now.steps.keys()):
        one, other = then.steps[step], now.steps[step]
        is_known = SeenParts.BATCH in one.seen & other.seen and not (one.seen ^ other.seen) & SeenParts.TARGETS
        if is_known and (one.batch, one.batches) != (other.batch, other.batches):
            return step
    return None


def _losses(then: Segment, now: Segment) -> dict[int, tuple[float, float]]:
    common = sorted(then.steps.keys() & now.steps.keys())[:MOST_LOSSES]
    pairs = {step: (then.steps[step], now.steps[step]) for step in common}
    return {step: (a.loss, b.loss) for step, (a, b) in pairs.items() if SeenParts.LOSS in a.seen & b.seen}


def strayed(own: Segment, first: Segment) -> tuple[int, int] | None:
    """The first step with other weights than the first rank's, where both held the same before, and these; None: none."""
    were_same = False
    rows = [(own.begins, first.begins)] if own.begins is not None and first.begins is not None else []
    rows += [(own.steps[step], first.steps[step]) for step in sorted(own.steps.keys() & first.steps.keys())]
    for one, other in rows:
        if SeenParts.WEIGHTS not in one.seen & other.seen or one.step != other.step:
            continue
        if one.weights != other.weights:
            return (one.step, one.weights) if were_same else None
        were_same = SeenParts.BEGINS not in one.seen
    return None


def began_the_same(then: Segment, begins: Print) -> bool | None:
    """Whether a segment has the state that another began with, by the weights; None where it has no print of that step."""
    own = then.begins if then.begins is not None and then.begins.step == begins.step else then.steps.get(begins.step)
    if own is None or SeenParts.WEIGHTS not in own.seen & begins.seen:
        return None
    return own.weights == begins.weights


def steps_after(segment: Segment, step: int) -> bool:
    """Whether it has a print of a later step."""
    return any(one > step for one in segment.steps)


def find_segment(segments: Sequence[Segment], begins: Print, *, is_known: bool) -> Segment | None:
    """The newest of these segments that goes on from the state with which another began.

    `is_known`: the journal says that this launch was there, so one whose print of that step is missing, or another, counts too.
    """
    going_on = [one for one in reversed(segments) if steps_after(one, begins.step)]
    same = next((one for one in going_on if began_the_same(one, begins)), None)
    return same or (next(iter(going_on), None) if is_known else None)


# ---- the rows ----------------------------------------------------------------------------------------------------------


def _steps(case: RetakenCase) -> str:
    first = min(rank.first_step for rank in case.compared)
    last = max(rank.last_step for rank in case.compared)
    return f"step {first:,}" if first == last else f"steps {first:,}–{last:,}"


def _on_ranks(case: RetakenCase) -> str:
    number = len(case.compared)
    return (
        f"on {number:,} rank{'' if number == 1 else 's'}"
        if number == case.ranks_now
        else (f"on {number:,} of {case.ranks_now:,} ranks (of the others nothing was compared)")
    )


def _equal(case: RetakenCase) -> str:
    beside = "" if case.same_batches(0) else f" ({case.batches})"
    return f"{_steps(case)} taken again: equal {_on_ranks(case)}{beside}{_of_rise(case)}"


def _close(case: RetakenCase) -> str:
    apart = case.apart
    assert apart is not None
    size = f", but for {case.loss_apart:.0e} of it" if case.loss_apart else ""
    bits = f"other bits from step {apart.step:,} on, {PARTS[case.part][1]}"
    return f"{_steps(case)} taken again {_on_ranks(case)}: {case.batches} and the same loss{size} ({bits}){_of_rise(case)}"


def _of_rise(case: RetakenCase) -> str:
    """Whether the rise came again."""
    if case.rise is None or case.came_again is None:
        return ""
    if case.came_again:
        return f"; the rise of step {case.rise.onset:,} came again: it is data × weights"
    return f"; the rise of step {case.rise.onset:,} did not come again, with the same batches: it is not the data alone"


class Parted(NamedTuple):
    """Replicas that stopped to be equal: at which step of which launch, and the ranks that left the others."""

    step: int
    launch: str
    ranks: tuple[int, ...]
    are_few: bool  # else nobody can tell who left whom


def parted(case: RetakenCase) -> Parted | None:
    """Ranks that held the same weights and became two groups within one launch; None: none did.

    Where each goes its own way, or one of two goes its own way in both launches, that is how they are trained.
    """
    if len(case.compared) != case.ranks_now:
        return None
    for place, launch in enumerate((f"launch {case.earlier}", "this launch")):
        left = {rank.rank: at for rank in case.ranks if (at := rank.strayed[place]) is not None}
        step = min((at[0] for at in left.values()), default=0)
        if len({weights for at, weights in left.values() if at == step}) != 1:
            continue
        ranks = tuple(left)
        if len(ranks) == len(case.ranks) - 1 > 1 and len(set(left.values())) == 1:
            ranks = (case.ranks[0].rank,)  # the others went together
        are_few = 2 * len(ranks) < len(case.ranks)
        is_usual = all(all(rank.strayed) for rank in case.ranks if rank.rank in left)
        if are_few or not is_usual:
            return Parted(step, launch, ranks, are_few)
    return None


def are_parted(case: RetakenCase) -> bool:
    """Whether replicas part, with the same batches."""
    found = parted(case)
    return found is not None and case.same_batches(found.step)


def _parted(case: RetakenCase) -> str:
    found = parted(case)
    assert found is not None
    verb, its = ("holds", "it held") if len(found.ranks) == 1 else ("hold", "they held")
    num_others = len(case.ranks) - len(found.ranks)
    others = "rank" if num_others == 1 else f"{num_others:,}"
    said = (f"rank {_numbers(found.ranks)} of {found.launch} {verb} other weights than the other {others} from step "
            f"{found.step:,} on, and {its} the same before: ")  # fmt: skip
    if not found.are_few:
        return f"{said}a fault on one of them, and nobody can tell on which"
    place = 0 if found.launch != "this launch" else 1
    nodes = [f"rank {rank.rank} on node {rank.hosts[place]}" for rank in case.ranks if rank.rank in found.ranks]
    return f"{said}look at {', '.join(nodes[:MOST_NAMED])}"


def _of_parted(case: RetakenCase) -> "Named":
    found = parted(case)
    assert found is not None
    return found.step, found.ranks if found.are_few else ()


def lone_losses(case: RetakenCase) -> tuple[int, tuple[int, ...]]:
    """The first step at which a loss is another number on some ranks and the same on all others, and these ranks; else (0, ()).

    It is computed before gradients are exchanged, so it tells where the fault was, also where no two launches have equal bits.
    """
    steps = sorted(set.intersection(*(set(rank.losses) for rank in case.ranks))) if case.ranks else []
    for step in steps:
        apart = {rank.rank: _apart(*rank.losses[step]) for rank in case.ranks}
        far = tuple(rank for rank, size in apart.items() if size > LAST_DIGITS)
        if not far:
            continue
        rest = max((size for rank, size in apart.items() if rank not in far), default=inf)
        is_lone = rest * FAR_APART <= min(apart[rank] for rank in far)
        return (step, far) if is_lone and step > steps[0] and case.is_whole(step) else (0, ())
    return 0, ()


def _lone(case: RetakenCase) -> str:
    step, ranks = lone_losses(case)
    nodes = [f"rank {rank.rank} on {_node(rank)}" for rank in case.ranks if rank.rank in ranks][:MOST_NAMED]
    size = max(_apart(*rank.losses[step]) for rank in case.ranks if rank.rank in ranks)
    return (f"the loss of rank {_numbers(ranks)} is another one at step {step:,} (by {size:.1g} of it), with the same batch; "
            f"those of the other ranks are the same: look at {', '.join(nodes)}")  # fmt: skip


def _other_begin(case: RetakenCase) -> str:
    return f"not comparable: the weights of step {case.start:,} are not those that launch {case.earlier} had"


def _other_ranks(case: RetakenCase) -> str:
    return f"not comparable: {case.ranks_then} ranks took these steps in launch {case.earlier}, and {case.ranks_now} do now"


def _other_options(case: RetakenCase) -> str:
    apart = case.apart
    assert apart is not None
    lrs = (
        f"LR {apart.record.lr:g} then, {apart.other.lr:g} now" if apart.record.lr != apart.other.lr else "other options"
    )
    equal = [PARTS[name][1] for name in ("batch", "gradient", "loss") if _is_equal_in(case, name)]
    beside = f"; until then equal: {', '.join(equal)} of step {apart.step:,}" if equal else ""
    return f"not comparable from step {apart.step:,} on: {lrs}{beside}"


def _is_equal_in(case: RetakenCase, name: str) -> bool:
    apart = case.apart
    assert apart is not None
    return name not in apart.parts and all(name in rank.parts for rank in case.compared)


def _generators(case: RetakenCase) -> str:
    apart = case.apart
    assert apart is not None
    return f"not comparable from step {apart.step:,} on: {PARTS[case.part][1]} stand elsewhere"


def _skipped(case: RetakenCase) -> str:
    return "not comparable: batches were skipped by the rollback"


def _other_batches(case: RetakenCase) -> str:
    apart = case.apart
    assert apart is not None
    is_first = "batch" in apart.parts
    step = apart.step if is_first else case.batches_part or apart.step
    ranks = apart.ranks if is_first else [rank.rank for rank in case.compared if rank.other_batch == step]
    where = "" if len(ranks) == len(case.compared) else f", on rank {_numbers(ranks)}"
    before = "" if is_first else f" (other bits before it: {PARTS[case.part][1]})"
    return f"not the same batches from step {step:,} on{where}{before}"


def _changed(case: RetakenCase) -> str:
    apart = case.apart
    assert apart is not None
    return f"another result from step {apart.step:,} on; changed since launch {case.earlier}: {case.named(*CAUSES, *SETTINGS)}"


def _other_machine(case: RetakenCase) -> str:
    apart, moved = case.apart, _moved(case)
    assert apart is not None
    then, now = moved[0].machines
    ranks = _numbers([rank.rank for rank in moved])
    return (
        f"another result from step {apart.step:,} on; rank {ranks} computes on another kind of machine: {then} → {now}"
    )


def _moved(case: RetakenCase) -> list[RankRetaken]:
    """Ranks that differ and compute on another kind of machine now."""
    return [rank for rank in case.ranks if rank.apart is not None and len(set(rank.machines)) > 1]


def _ranks(case: RetakenCase) -> str:
    apart, (part, ranks) = case.apart, own_ranks(case)
    assert apart is not None
    nodes = [f"rank {rank.rank} on {_node(rank)}" for rank in case.ranks if rank.rank in ranks][:MOST_NAMED]
    verb, its = ("differs", "its batch was") if len(ranks) == 1 else ("differ", "their batches were")
    others = (
        "the other rank is"
        if case.ranks_now - len(ranks) == 1
        else f"the other {case.ranks_now - len(ranks):,} ranks are"
    )
    return (f"rank {_numbers(ranks)} {verb} from step {apart.step:,} on ({PARTS[part][1]}); {its} equal, and {others} equal to "
            f"the last bit: look at {', '.join(nodes)}{_beside(case)}")  # fmt: skip


def _beside(case: RetakenCase) -> str:
    changed = case.named(*SETTINGS)
    return f" (changed since launch {case.earlier}: {changed})" if changed else ""


def _node(rank: RankRetaken) -> str:
    then, now = rank.hosts
    return f"node {now}" if then == now else f"node {then} then, {now} now"


def _numbers(ranks: Sequence[int]) -> str:
    more = len(ranks) - MOST_NAMED
    return ", ".join(map(str, ranks[:MOST_NAMED])) + (f" and {more:,} more" if more > 0 else "")


def _all(case: RetakenCase) -> str:
    apart = case.apart
    assert apart is not None
    where = f"rank {_numbers(apart.ranks)}" if len(apart.ranks) < case.ranks_now else "every rank"
    said = f"another result from step {apart.step:,} on, {where} ({PARTS[case.part][1]}), {case.batches}"
    if case.loss_apart is not None:
        said += f"; the loss differs by at most {case.loss_apart:.1g} of it"
    said += _of_rise(case)
    if any(rank.unrestored for rank in case.ranks):
        said += "; torch's generators stand elsewhere, without effect before it"
    if case.equal_before < 1:
        return f"{said}. State that no print holds (moments) may be another, or the arithmetic does not repeat itself"
    spread = ", which the exchange of gradients spread" if case.ranks_now > 1 else ""
    return (f"{said}. {case.equal_before:,} equal before it: the arithmetic does not repeat itself, or one of the two launches "
            f"had a fault{spread}")  # fmt: skip


CAUSES = ("code", "package", "arithmetic", "library")
SETTINGS = ("environment", "file")  # differ between many launches, and then all ranks do


def own_ranks(case: RetakenCase) -> tuple[str, tuple[int, ...]]:
    """The part in which some ranks differ by themselves, and these ranks; ("", ()) where nobody can tell.

    The parts are looked at in the order in which a step makes them. The others must have been compared in the same part of
    the same step, and be equal. A gradient is a sum over ranks: one that differs on some ranks alone arose there only where
    all hold the same weights, else another rank's share may lie in their part.
    """
    apart = case.apart
    if apart is None or case.equal_before < 1 or not case.is_whole(apart.step):
        return "", ()
    are_replicas = len({rank.begins for rank in case.ranks}) == 1 and case.ranks[0].begins != 0
    has_gradient = all("gradient" in rank.parts for rank in case.ranks)
    tells = {"loss": True, "gradient": are_replicas, "weights": has_gradient}
    for part, does_tell in tells.items():
        ranks = [one.rank for one in case.ranks if one.apart is not None and _differs_in(one.apart, part, apart.step)]
        if not ranks or not all(part in rank.parts and rank.last_step >= apart.step for rank in case.ranks):
            continue
        return (part, tuple(ranks)) if does_tell and len(ranks) < len(case.ranks) else ("", ())
    return "", ()


def _differs_in(apart: PrintDifference, part: str, step: int) -> bool:
    return apart.step == step and part in apart.parts


def is_close(case: RetakenCase) -> bool:
    """Whether losses were compared, and all are the same but for their last digits."""
    return case.loss_apart is not None and case.loss_apart <= LAST_DIGITS


Named = tuple[int, tuple[int, ...]]  # a step, and ranks


def _apart_of(case: RetakenCase) -> Named:
    return (case.start, ()) if case.apart is None else (case.apart.step, tuple(case.apart.ranks))


class Row(NamedTuple):
    """One row: what it is about, when it fits, its verdict and its words. The first that fits is the answer.

    `named`: the step and the ranks that it is about.
    """

    name: str
    fits: Callable[[RetakenCase], bool]
    verdict: RetakenVerdict
    words: Callable[[RetakenCase], str]
    named: Callable[[RetakenCase], Named] = _apart_of


V = RetakenVerdict
ROWS: tuple[Row, ...] = (
    Row("another number of ranks", lambda case: case.ranks_then != case.ranks_now, V.NOT_COMPARABLE, _other_ranks),
    Row("other weights to begin with", lambda case: any(rank.begins_equal is False for rank in case.ranks),
        V.NOT_COMPARABLE, _other_begin),
    Row("a replica strayed", lambda case: (found := parted(case)) is not None and found.are_few, V.RANKS, _parted, _of_parted),
    Row("no result in the prints",
        lambda case: case.apart is None and not any(rank.parts & {"gradient", "weights", "loss"} for rank in case.compared),
        V.NOT_COMPARABLE, lambda case: "not comparable: the prints hold no gradient, loss or weights"),
    Row("equal", lambda case: case.apart is None, V.EQUAL, _equal),
    Row("options", lambda case: case.part == "options", V.NOT_COMPARABLE, _other_options),
    Row("batches were skipped", lambda case: case.skipped and (case.is_of_data or case.part in GENERATORS),
        V.NOT_COMPARABLE, _skipped),
    Row("batch", lambda case: case.is_of_data, V.DATA, _other_batches),
    Row("the loss of some ranks", lambda case: bool(lone_losses(case)[1]), V.RANKS, _lone, lone_losses),
    Row("replicas part", lambda case: are_parted(case) and not own_ranks(case)[1], V.RANKS, _parted, _of_parted),
    Row("the last digits", lambda case: case.differs_at_once and is_close(case), V.CLOSE, _close),
    Row("generators", lambda case: case.part in GENERATORS, V.NOT_COMPARABLE, _generators),
    Row("something has changed", lambda case: bool(case.named(*CAUSES)), V.CODE, _changed),
    Row("another kind of machine", lambda case: bool(_moved(case)), V.CODE, _other_machine),
    Row("some ranks", lambda case: bool(own_ranks(case)[1]), V.RANKS, _ranks,
        lambda case: (_apart_of(case)[0], own_ranks(case)[1])),
    Row("settings have changed", lambda case: bool(case.named(*SETTINGS)), V.CODE, _changed),
    Row("the result alone", lambda case: True, V.RESULT, _all),
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
    row = next(row for row in ROWS if row.fits(case))
    step, ranks = row.named(case)
    return Retaken(verdict=row.verdict, why=row.words(case), step=step, ranks=ranks)


def rise_in(rises: Iterable[Rise], ranks: Sequence[RankRetaken]) -> Rise | None:
    """The first of these rises whose onset and peak lie in the steps of which both launches have a print."""
    steps = next((rank.losses for rank in ranks if rank.losses), {})
    first, last = min(steps, default=0), max(steps, default=0)
    return min((rise for rise in rises if first <= rise.onset and rise.peak <= last), default=None)
