"""`chronicle rollback --try`: short forks of the ways back, before one is taken, and their order by the loss at equal steps.

Each way is a checkpoint and the options of a rollback: as asked, go on without one, half the LR, an older checkpoint, other
data. All are run to the same step, so that they have seen as many tokens, and the losses of the last half of the tried steps
are compared. A way whose loss is not a number, which ends the fork, that the detector warns of, or that ends by itself comes
last. Two means that lie within two standard errors of their difference are not told apart. What was found is an entry in the
journal, and a line of the plan.
"""

import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from chronicle.errors import ChronicleError, Refusal, UsageProblem
from chronicle.journal import Entry, JournalWriter, compute_lineage, read_journal
from chronicle.journal.events import Searched, Tried
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

__all__ = ["Way", "WayTried", "answer_of", "order", "try_ways"]

UNSTEADY = 10.0  # times the other's error: no noise of eight blocks makes that
BLOCKS = 8  # of the compared losses: means of neighbours, which are nearly independent


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way on: a checkpoint, and the options of `chronicle rollback` for it. `words`: what it is."""

    words: str
    begin: AsRecorded
    options: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """What to type to take it; "" where nothing is rolled back."""
        return f"chronicle rollback --to {self.begin[0]} {' '.join(self.options)}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class WayTried:
    """What came of a way. `loss`, `error`: mean of the compared losses and its standard error. `trouble`: why it comes last."""

    way: Way
    loss: float | None = None
    error: float | None = None
    trouble: str = ""
    last_step: int | None = None
    seconds: float = 0.0

    def equals(self, other: "WayTried") -> bool:
        """Whether two ways are not told apart."""
        if self.trouble or other.trouble:
            return bool(self.trouble) == bool(other.trouble)
        if None in (self.loss, other.loss, self.error, other.error):
            return False
        assert self.loss is not None and other.loss is not None and self.error is not None and other.error is not None
        if max(self.error, other.error) > UNSTEADY * min(self.error, other.error):
            return False  # a loss that explodes has an error as large as itself
        return abs(self.loss - other.loss) <= 2 * math.hypot(self.error, other.error)


def try_ways(
    settings: Settings,
    step: int,
    options: Sequence[str],
    *,
    count: int,
    steps: int,
    sandbox: Path | None = None,
    say: Say = lambda line: None,
) -> tuple[list[WayTried], Entry]:
    """Run `count` ways for `steps` steps after the newest checkpoint, and record their order, best first.

    `step`, `options`: the rollback that was asked for. Raises `Refusal` or `UsageProblem` where nothing could be tried.
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
    ways = list(_ways(listed, step, tuple(options)))[:count]
    until = max(way.begin[0] for way in ways) + steps
    after = until - max(1, steps // 2)
    total = sum(until - way.begin[0] for way in ways)
    say(f"{len(ways)} ways to step {until}, {total} steps in all; compared over steps {after + 1} to {until}")
    asked = [[way.words, way.options, way.begin[2].get("id"), until] for way in ways]
    digest = hashlib.sha256(json.dumps(asked, default=str).encode()).hexdigest()[:16]
    found = []
    for way in ways:
        one = _try(way, origin=begin_at(origin, way.begin), until=until, after=after, sandbox=sandbox)
        say(f"{way.words}: {_result(one)}")
        found.append(one)
        event = Tried(search=digest, change=way.words, verdict="bad" if one.trouble else "good", why=_result(one),
                      start=way.begin[0], last_step=one.last_step, loss=one.loss, seconds=round(one.seconds, 1))  # fmt: skip
        with JournalWriter(settings.paths) as writer:
            writer.write(event, launch=number, step=one.last_step, title=f"try: {way.words}: {_result(one)}")
    ranked = order(found)
    answer = answer_of(ranked)
    event_of_all = Searched(
        axis="rollback", search=digest, answer=answer, found=not ranked[0].trouble, start=step, until=until,
        rows=tuple({"change": one.way.words, "verdict": _result(one), "loss": one.loss, "error": one.error,
                    "last_step": one.last_step, "command": one.way.command} for one in ranked),
        seconds=round(time.monotonic() - begun, 1),
    )  # fmt: skip
    with JournalWriter(settings.paths) as writer:
        return ranked, writer.write(event_of_all, launch=number, step=until, title=f"tries: {answer}")


def _ways(listed: Sequence[AsRecorded], step: int, options: tuple[str, ...]) -> Iterator[Way]:
    """The ways on, those first that say most; each is another one."""
    target = next((one for one in listed if one[0] == step), None)
    if target is None:
        steps = ", ".join(str(one[0]) for one in listed[-8:]) or "none"
        raise Refusal(f"no verified checkpoint of step {step}: verified are {steps}")
    asked = f"back to step {step}" + (f" with {' '.join(options)}" if options else "")
    yield Way(words=asked, begin=target, options=options)
    if listed[-1][0] != step:
        yield Way(words=f"on from step {listed[-1][0]} as it is", begin=listed[-1])
    elif options:
        yield Way(words=f"on from step {step} as it is", begin=target)
    if options != ("--lr-scale", "0.5"):
        yield Way(words=f"back to step {step} with half the LR", begin=target, options=("--lr-scale", "0.5"))
    older = [one for one in listed if one[0] < step]
    if older:
        yield Way(words=f"back to step {older[-1][0]}", begin=older[-1])
    if "--reshuffle" not in options:
        yield Way(words=f"back to step {step} with the data in another order", begin=target, options=("--reshuffle",))
    if options:
        yield Way(words=f"back to step {step}, nothing changed", begin=target)


def _try(way: Way, *, origin: Origin, until: int, after: int, sandbox: Path | None) -> WayTried:
    begun = time.monotonic()
    change = ForkChange(rollback=way.options)
    try:
        with play(origin, until, sandbox=sandbox, change=change, purpose="try", scan=True) as forked:
            loss, error, trouble = _weigh(forked, until, after)
            last = forked.last_step
    except ChronicleError as problem:  # one way that cannot be gone does not end the others
        return WayTried(way=way, trouble=problem.message, seconds=time.monotonic() - begun)
    seconds = time.monotonic() - begun
    return WayTried(way=way, loss=loss, error=error, trouble=trouble, last_step=last, seconds=seconds)


def _weigh(forked: Forked, until: int, after: int) -> tuple[float | None, float | None, str]:
    losses = [loss for step, loss in forked.losses if step > after]
    wrong = next(((step, loss) for step, loss in forked.losses if not math.isfinite(loss)), None)
    if wrong is not None:
        return None, None, f"the loss is {wrong[1]} at step {wrong[0]}"
    if not losses or forked.last_step is None or forked.last_step < until:
        return None, None, f"it ended at step {forked.last_step} ({forked.warned or forked.why_ended})"
    mean, error = _mean_and_error(losses)
    return mean, error, forked.warned


def _mean_and_error(losses: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and its standard error from the means of blocks; None for the error where there are fewer than two."""
    size = max(1, len(losses) // BLOCKS)
    blocks = [fmean(losses[start : start + size]) for start in range(0, len(losses) - size + 1, size)]
    return fmean(losses), stdev(blocks) / math.sqrt(len(blocks)) if len(blocks) > 1 else None


def order(found: Iterable[WayTried]) -> list[WayTried]:
    """Best first: without trouble before with, then by the mean loss; among those not told apart, as they were asked for."""
    asked = list(found)
    ranked = sorted(asked, key=lambda one: (bool(one.trouble), one.loss if one.loss is not None else math.inf))
    best = ranked[0]
    level = [one for one in asked if one.equals(best)] if not best.trouble else []
    return [*level, *(one for one in ranked if one not in level)]


def answer_of(ranked: Sequence[WayTried]) -> str:
    """One sentence: the best way, and which are not told apart from it."""
    best = ranked[0]
    if best.trouble:
        return f"none of {len(ranked)} ways goes well: {best.way.words}: {best.trouble}"
    level = [one.way.words for one in ranked[1:] if one.equals(best)]
    more = f"; not told apart from it: {', '.join(level)}" if level else ""
    return f"{best.way.words} goes best: {_result(best)}{more}"


def _result(one: WayTried) -> str:
    if one.loss is None:
        return one.trouble
    error = "" if one.error is None else f" ± {one.error:.2g}"
    return f"loss {one.loss:.4g}{error}" + (f", {one.trouble}" if one.trouble else "")
