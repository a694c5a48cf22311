"""`chronicle rollback --try`: short forks of the ways back, before one is taken, and their order by the loss at equal steps.

Each way is a checkpoint and the options of a rollback: as asked, other data, half the LR further back, twice as far back, a
lower β2, half the LR, on without one. What cannot be done here is named, and is not counted. All go to the same step, beyond
where the run came, so that they have seen as many tokens. The losses of the last half of the tried steps are compared in
pairs, step by step: a way is equivalent to the best one (within the margin by which the detector calls an event recovered),
worse, or not told apart. A way whose loss is not a number, which ends the fork, that the detector still warns of at the end,
or that ends by itself comes last. Where it rose so far that a rollback would have been proposed, and came back, that is said:
a launch that takes this way waits as long before it proposes one (`watch/foreseen.py`). Every fork is an entry in the
journal: type the same again, and those that are done are not played again. The answer is a line of the plan.
"""

import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

from chronicle.errors import ChronicleError, Refusal, UsageProblem
from chronicle.journal import Entry, JournalWriter, compute_lineage, read_journal
from chronicle.journal.events import Proposed, Searched, Tried, events_of
from chronicle.launch.code import read_code
from chronicle.metrics.log import logged_pace
from chronicle.replay.fork import (
    AsRecorded,
    ForkChange,
    Forked,
    Origin,
    Say,
    as_recorded,
    begin_at,
    find_origin,
    play,
    usable,
)
from chronicle.settings import Settings
from chronicle.watch.advice import collect_candidates
from rollback.checkpoint.listing import read_state
from rollback.detect import Status, Tier
from rollback.detect.constants import EQUIVALENT, LEVEL_FLOOR
from rollback.errors import RollbackError
from rollback.plan.lr import beta2_of
from rollback.plan.request import BETA2, RESHUFFLE, SKIP
from rollback.propose import SKIP_AFTER_ONSET, CandidateCheckpoint

BLOCKS = 8  # of the compared losses: means of neighbours, which are nearly independent
ALL_ABOVE = 5  # blocks that are all higher: by chance in 3 % of cases
T_95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.9)  # Student's, one side, for two blocks to eight
LOWER_BETA2 = 0.95


class Versus(StrEnum):
    """How a way compares with another one."""

    WORSE = "worse"
    EQUIVALENT = "equivalent"
    UNTOLD = "not told apart"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way on: a checkpoint, and the options of `chronicle rollback` for it. `words`: what it is."""

    words: str
    begin: AsRecorded
    options: tuple[str, ...] = ()
    impossible: str = ""  # why it cannot be gone here, where that is known beforehand
    within: int | None = None  # onset of the incident that it begins in: the detector sees no rise there

    @property
    def command(self) -> str:
        """What to type to take it."""
        return f"chronicle rollback --to {self.begin[0]} {' '.join(self.options)}".rstrip()

    @property
    def lr_scale(self) -> float:
        """The factor of its LR, 1 where it is not changed by one."""
        named = self.options.index("--lr-scale") + 1 if "--lr-scale" in self.options else 0
        return float(self.options[named]) if named else 1.0

    def is_lower_for_longer(self, other: "Way") -> bool:
        """Whether it trains at a lower LR than the other way, or from an earlier step on at the same lowered one."""
        mine, its = (self.lr_scale, self.begin[0]), (other.lr_scale, other.begin[0])
        return mine < its and self.lr_scale < 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WayTried:
    """What came of a way. `blocks`: means of the compared losses, of the same steps in all ways. `trouble`: why it is last."""

    way: Way
    loss: float | None = None
    blocks: tuple[float, ...] = ()
    noise: float | None = None  # of one loss, without its drift
    trouble: str = ""
    rises: tuple[tuple[int, int], ...] = ()  # (onset, recovered): a rollback would have been proposed, and they came back
    last_step: int | None = None
    seconds: float = 0.0
    known: bool = field(default=False, compare=False)  # from the journal: it was tried before

    @property
    def is_run(self) -> bool:
        """Whether it took a step: else nothing is known of this way."""
        return self.last_step is not None

    @property
    def margin(self) -> float:
        """Another loss within it is as good: what the detector calls recovered."""
        return max(EQUIVALENT * (self.noise or 0.0), LEVEL_FLOOR * abs(self.loss or 0.0))

    def versus(self, better: "WayTried") -> Versus:
        """Whether it is worse than the other, from the differences at the same steps; equivalence by two one-sided tests.

        A lower LR lowers the loss at once, and tells nothing of the state or the data: with it, or with it for longer, the
        other one is no better.
        """
        if not (self.is_run and better.is_run):
            return Versus.UNTOLD
        if bool(self.trouble) != bool(better.trouble):
            return Versus.WORSE if self.trouble else Versus.UNTOLD
        pairs = list(zip(self.blocks, better.blocks, strict=False))
        if len(pairs) < 2 or len(self.blocks) != len(better.blocks):
            return Versus.UNTOLD
        apart = [mine - other for mine, other in pairs]
        mean, doubt = fmean(apart), T_95[len(apart) - 2] * stdev(apart) / math.sqrt(len(apart))
        if abs(mean) + doubt < better.margin:
            return Versus.EQUIVALENT
        above = len(apart) >= ALL_ABOVE and min(apart) > 0  # also where it explodes, with an error as large as itself
        if not (mean > doubt or above) or better.way.is_lower_for_longer(self.way):
            return Versus.UNTOLD
        return Versus.WORSE


def try_ways(
    settings: Settings,
    step: int,
    options: Sequence[str],
    *,
    count: int,
    steps: int,
    place: Sequence[str] = (),
    sandbox: Path | None = None,
    say: Say = lambda line: None,
) -> tuple[list[WayTried], Entry]:
    """Run `count` ways until `steps` steps beyond where the run came, and record their order, best first.

    `step`, `options`: the rollback that was asked for. `place`: the options that name the run, for the commands. Raises
    `Refusal` or `UsageProblem` where nothing could be tried.
    """
    if count < 2 or steps < 2:
        raise UsageProblem(f"--try {count} --try-steps {steps}: expected two ways and two steps or more")
    begun = time.monotonic()
    entries = read_journal(settings.paths).entries
    number = compute_lineage(entries).head_launch
    if number is None:
        raise Refusal("the run has no launch that could be started again")
    origin = find_origin(settings, entries, number, 1 << 62, again="chronicle rollback --try")
    listed = [one for one in as_recorded(origin, entries) if usable(one[1], entries)]
    if not listed:
        raise Refusal("no verified checkpoint is left: there is no way back that could be tried")
    last, pace = logged_pace(settings.paths, number)
    head = max(last or 0, *(one[0] for one in listed))
    ways = _first(_ways(origin, listed, step, tuple(options), entries, head), count, say)
    until = head + steps
    after = until - max(1, steps // 2)
    code = read_code(origin.cwd, with_patch=False)
    asked = [origin.command, number, listed[-1][2].get("id"), until, after, code.commit, code.digest]
    digest = hashlib.sha256(json.dumps(asked, default=str).encode()).hexdigest()[:16]
    known = {event.change: event for _, event in events_of(entries, Tried) if event.search == digest}
    total = sum(until - way.begin[0] for way in ways if way.command not in known)
    lasts = "" if pace is None else f", about {_duration(total * pace)} and {len(ways)} starts"
    say(f"{len(ways)} ways to step {until}, {total} steps in all{lasts}; compared over steps {after + 1} to {until}")
    found = []
    try:
        for way in ways:
            one = _known(way, known) or _try(way, begin_at(origin, way.begin), until, after, sandbox)
            say(f"{way.words}: {_result(one)}{', tried before' if one.known else ''}")
            found.append(one)
            if not one.known:
                _record(settings, one, digest, number)
    except KeyboardInterrupt:
        say(f"interrupted: nothing was changed; type it again to go on with way {len(found) + 1} of {len(ways)}")
        raise
    ranked = order(found)
    answer = answer_of(ranked)
    event_of_all = Searched(
        axis="rollback", search=digest, answer=answer, found=not ranked[0].trouble, start=step, until=until,
        rows=tuple({"change": one.way.words, "verdict": _result(one), "loss": one.loss, "last_step": one.last_step,
                    "begin": one.way.begin[0], "trouble": one.trouble, "versus": _versus_first(one, ranked),
                    "command": " ".join([one.way.command, *place])} for one in ranked),
        seconds=round(time.monotonic() - begun, 1),
    )  # fmt: skip
    with JournalWriter(settings.paths) as writer:
        return ranked, writer.write(event_of_all, launch=number, step=until, title=f"tries: {answer}")


# ---- the ways ----------------------------------------------------------------------------------------------------------


def _first(ways: Iterable[Way], count: int, say: Say) -> list[Way]:
    """The first `count` that are possible and differ; those that are not are said."""
    found: dict[str, Way] = {}
    for way in ways:
        if way.impossible:
            say(f"not tried, {way.words}: {way.impossible}")
        else:
            found.setdefault(way.command, way)
        if len(found) == count:
            break
    return list(found.values())


def _ways(
    origin: Origin, listed: Sequence[AsRecorded], step: int, options: tuple[str, ...], entries: Sequence[Entry], head: int
) -> Iterator[Way]:
    """The ways on: as asked, other data, what the policy's ladder never says (β2, twice as far back), lower and further back.

    `head`: the last step that the run took.
    """
    target = next((one for one in listed if one[0] == step), None)
    if target is None:
        steps = ", ".join(str(one[0]) for one in listed[-8:]) or "none"
        raise Refusal(f"no verified checkpoint of step {step}: verified are {steps}")
    back, newest = f"back to step {step}", listed[-1]
    yield Way(words=back + _with(options), begin=target, options=options)
    candidates = {one.step: one for one in collect_candidates(origin.roots, before=step, entries=entries)}
    policy = candidates.get(step) or CandidateCheckpoint(step=step)
    honours = policy.honours or frozenset()
    onset = max((p.onset_step for _, p in events_of(entries, Proposed) if p.onset_step is not None), default=newest[0])
    skipped = str(max(onset, step) + SKIP_AFTER_ONSET - step)
    if SKIP in honours and "--skip-batches" not in options:
        yield Way(words=f"{back} without {skipped} batches", begin=target, options=("--skip-batches", skipped))
    elif not honours & {SKIP, RESHUFFLE}:
        why = "the run supports neither --skip-batches nor --reshuffle"
        yield Way(words=f"{back} with other data", begin=target, impossible=why)
    if RESHUFFLE in honours and SKIP not in honours:
        yield Way(words=f"{back} with the data in another order", begin=target, options=("--reshuffle",))
    half = ("--lr-scale", "0.5")
    older = [one for one in listed if one[0] < step]
    beta2 = _beta2(target)
    if beta2 is not None and beta2 > LOWER_BETA2:
        lower = ("--set", f"{BETA2}={LOWER_BETA2}")
        yield Way(words=f"{back} with β2 {LOWER_BETA2} instead of {beta2:g}", begin=target, options=lower)
    if older:  # for a state that was spoilt long before it showed
        far = next((one for one in reversed(older) if one[0] <= step - (head - step)), older[0])
        kept = () if "--skip-batches" in options else options
        yield Way(words=f"back to step {far[0]}{_with(kept)}", begin=far, options=kept)
    if older and not policy.lr_elsewhere:  # as the ladder climbs: lower and further back
        yield Way(words=f"back to step {older[-1][0]} with half the LR", begin=older[-1], options=half)
    yield Way(words=f"{back} with half the LR", begin=target, options=half, impossible=policy.lr_elsewhere)
    if newest[0] != step:
        begun = [p.onset_step for entry, p in events_of(entries, Proposed) if entry.launch == origin.launch]
        within = max((one for one in begun if one is not None and one <= newest[0]), default=None)
        yield Way(words=f"on from step {newest[0]} as it is", begin=newest, within=within)
    if SKIP in honours and RESHUFFLE in honours:
        yield Way(words=f"{back} with the data in another order", begin=target, options=("--reshuffle",))
    yield Way(words=f"{back}, nothing changed", begin=target)


def _with(options: Sequence[str]) -> str:
    return f" with {' '.join(options)}" if options else ""


def _beta2(one: AsRecorded) -> float | None:
    try:
        return beta2_of(read_state(one[1]))
    except (RollbackError, OSError):
        return None


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# ---- a try -------------------------------------------------------------------------------------------------------------


def _known(way: Way, known: dict[str, Tried]) -> WayTried | None:
    event = known.get(way.command)
    if event is None or event.last_step is None:  # it could not be started: perhaps now it can
        return None
    return WayTried(
        way=way, loss=event.loss, blocks=tuple(event.blocks), noise=event.noise, last_step=event.last_step,
        rises=tuple((int(onset), int(back)) for onset, back in event.rises),
        trouble=event.why if event.verdict == "bad" else "", seconds=event.seconds or 0.0, known=True,
    )  # fmt: skip


def _record(settings: Settings, one: WayTried, digest: str, number: int) -> None:
    event = Tried(search=digest, change=one.way.command, verdict=_verdict(one), why=one.trouble,
                  start=one.way.begin[0], last_step=one.last_step, loss=one.loss, blocks=one.blocks, noise=one.noise,
                  rises=one.rises, state=str(one.way.begin[2].get("id") or ""), seconds=round(one.seconds, 1))  # fmt: skip
    with JournalWriter(settings.paths) as writer:
        writer.write(event, launch=number, step=one.last_step, title=f"try: {one.way.words}: {_result(one)}")


def _verdict(one: WayTried) -> str:
    return "skipped" if not one.is_run else "bad" if one.trouble else "good"


def _try(way: Way, origin: Origin, until: int, after: int, sandbox: Path | None) -> WayTried:
    begun = time.monotonic()
    change = ForkChange(rollback=way.options)
    try:
        with play(origin, until, sandbox=sandbox, change=change, purpose="try", scan=True) as forked:
            return _weighed(way, forked, until, after, time.monotonic() - begun)
    except ChronicleError as problem:  # one way that cannot be gone does not end the others
        return WayTried(way=way, trouble=problem.message, seconds=time.monotonic() - begun)


def _weighed(way: Way, forked: Forked, until: int, after: int, seconds: float) -> WayTried:
    if forked.end.get("code") == 0 and forked.last_step is not None and forked.last_step < until:
        after, until = after - until + forked.last_step, forked.last_step  # the training's own end: that of all ways
    losses = [(step, loss) for step, loss in forked.losses if step > after]
    wrong = next(((step, loss) for step, loss in forked.losses if not math.isfinite(loss)), None)
    trouble = _still_warned(forked)
    if wrong is not None:
        losses, trouble = [], f"the loss is {wrong[1]} at step {wrong[0]}"
    elif not losses or forked.last_step is None or forked.last_step < until:
        losses, trouble = [], f"it ended at step {forked.last_step} ({forked.warned or forked.why_ended})"
    elif way.begin[0] > after:  # it missed some of the compared steps: where nothing was seen, nothing is warned of
        losses, trouble = [], f"it came to the training's end after {until - way.begin[0]} steps: too few to tell"
    elif way.within is not None and not trouble:
        trouble = f"it begins in the incident (since step {way.within}): whether that is over is not told"
    values = [loss for _, loss in losses]
    turns = [(later - one) ** 2 for one, later in pairwise(values)]
    return WayTried(
        way=way, loss=fmean(values) if values else None, blocks=_blocks(losses, until, after), trouble=trouble,
        noise=math.sqrt(fmean(turns) / 2) if turns else None, rises=() if trouble else _rises(forked),
        last_step=forked.last_step, seconds=seconds,
    )  # fmt: skip


def _still_warned(forked: Forked) -> str:
    """What the detector warns of at the end. A rise that came back is none: the loss tells what it cost."""
    events = [event for event in forked.end.get("events", ()) if event["tier"] != Tier.NOTICE.value]
    lasting = (one for one in events if one["status"] != Status.RECOVERED.value)
    return next((f"{event['kind']} from step {event['onset_step'] or event['alarm_step']}" for event in lasting), "")


def _rises(forked: Forked) -> tuple[tuple[int, int], ...]:
    """Where a rollback would have been proposed on the way, and the loss came back by itself: (onset, recovered)."""
    called = (one for one in forked.end.get("events", ()) if one["tier"] == Tier.PROPOSE.value)
    back = ((one["onset_step"] or one["alarm_step"], one.get("recovered_step")) for one in called)
    return tuple((onset, step) for onset, step in back if step is not None)


def _blocks(losses: Sequence[tuple[int, float]], until: int, after: int) -> tuple[float, ...]:
    """Means of the losses of each eighth of the compared steps; fewer where fewer steps were logged."""
    num = min(BLOCKS, len(losses))
    rows: dict[int, list[float]] = {}
    for step, loss in losses:
        rows.setdefault((step - after - 1) * num // (until - after), []).append(loss)
    return tuple(fmean(rows[place]) for place in sorted(rows))


# ---- the order ---------------------------------------------------------------------------------------------------------


def order(found: Iterable[WayTried]) -> list[WayTried]:
    """Best first: what took a step, without trouble, then by the mean loss; what is not worse than the best, as asked."""
    asked = list(found)
    ranked = sorted(asked, key=lambda one: (not one.is_run, bool(one.trouble), one.loss if one.loss is not None else math.inf))
    best = ranked[0]
    level = [one for one in asked if one is best or (one.blocks and one.versus(best) is not Versus.WORSE)]
    return [*level, *(one for one in ranked if one not in level)]


def answer_of(ranked: Sequence[WayTried]) -> str:
    """One sentence: the best way, which are equivalent to it, and which are not told apart from it."""
    best = ranked[0]
    if not best.is_run:
        return f"nothing is known: none of {len(ranked)} ways took a step; {best.way.words}: {_result(best)}"
    run = [one for one in ranked if one.is_run]
    named = [f"{one.way.words} ({_result(one)})" for one in ranked if not one.is_run]
    not_run = [f"could not be tried: {', '.join(named)}"] if named else []
    if best.trouble:
        worse = [one.way.words for one in run[1:] if one.versus(best) is Versus.WORSE]
        told = [f"none of {len(run)} ways goes well: {best.way.words}: {_result(best)}"]
        told += [f"worse: {', '.join(worse)}"] if worse else []
        return "; ".join([*told, *not_run])
    parts = [f"{best.way.words} goes best: {_result(best)}"]
    for kind in (Versus.EQUIVALENT, Versus.UNTOLD):
        named = [one.way.words for one in run[1:] if one.versus(best) is kind]
        within = f" within ± {best.margin:.2g}" if kind is Versus.EQUIVALENT else ""
        parts += [f"{kind}{within}: {', '.join(named)}"] if named else []
    return "; ".join([*parts, *not_run])


def _versus_first(one: WayTried, ranked: Sequence[WayTried]) -> str:
    return "" if one is ranked[0] else one.versus(ranked[0]).value


def _result(one: WayTried) -> str:
    if one.loss is None:
        return one.trouble
    rises = "".join(f", after a rise from step {onset} that came back by step {back}" for onset, back in one.rises[:2])
    return f"loss {one.loss:.4g}{rises}" + (f", {one.trouble}" if one.trouble else "")
