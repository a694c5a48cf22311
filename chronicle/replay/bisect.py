"""`chronicle bisect`: which change made a run go bad, by halving. Each trial is a fork of a recorded launch.

An axis is an ordered list of candidates, the first of which goes well and the last of which does not: commits, checkpoints,
LR factors, how much of the data is skipped, or any values that a command takes. A judge says of each trial whether it went
well: the detector, equality with the recorded steps, a condition on the last values, or a command of the user. Halving needs
at most log2 n + 2 trials. Every trial is an entry in the journal, with the digest of what was asked: a bisect that was
interrupted goes on where it was.
"""

import hashlib
import json
import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from chronicle.errors import ChronicleError, Refusal, UsageProblem
from chronicle.journal import Entry, JournalWriter, compute_lineage, read_journal
from chronicle.journal.events import Searched, Tried, events_of
from chronicle.launch.code import CodeChange, commits_between, top_of
from chronicle.prints.compared import compare_prints
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
from chronicle.resume.ring import Ring, rings_of
from chronicle.settings import Settings

FINEST = 1.1  # neighbouring LR factors
SKIPPED_CODE = 125  # of the user's command, as in git's own bisect


class Axis(StrEnum):
    """What is halved."""

    COMMITS = "commits"
    STEPS = "steps"
    LR = "lr-scale"
    DATA = "data"
    VALUES = "values"
    AMONG = "among"


class TrialOutcome(StrEnum):
    """What a trial says."""

    GOOD = "good"
    BAD = "bad"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One place on the axis: its name, and what a trial of it has otherwise. `begin`: its own checkpoint."""

    name: str
    change: ForkChange = field(default_factory=ForkChange)
    begin: AsRecorded | None = None
    words: str = ""  # more about it than its name, for the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectTrial:
    """One fork that was judged."""

    name: str
    outcome: TrialOutcome
    why: str
    last_step: int | None = None
    loss: float | None = None
    seconds: float = 0.0
    known: bool = False  # from the journal: it was tried before


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectAnswer:
    """What halving found: the last candidate that goes well and the first that does not; `left`: untold ones between them.

    `untold`: a trial of one of the ends that could not be judged, so that nothing was found.
    """

    trials: tuple[BisectTrial, ...]
    good: int | None = None
    bad: int | None = None
    left: tuple[int, ...] = ()
    untold: BisectTrial | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisect:
    """What is asked: candidates from good to bad, and how a trial is judged."""

    origin: Origin
    axis: Axis
    candidates: tuple[Candidate, ...]
    until: int
    bad_if: str
    judge: str = ""  # a shell command
    rings: Mapping[int, Ring] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """What identifies it: two bisects with one digest ask the same."""
        rows = [[one.name, one.change.rollback, one.change.command, one.begin[2].get("id") if one.begin else None]
                for one in self.candidates]  # fmt: skip
        checkpoint = self.origin.identity.get("id") or str(self.origin.checkpoint and self.origin.checkpoint.path)
        asked = [self.axis, rows, self.until, self.bad_if, self.judge, self.origin.command, self.origin.launch, checkpoint]
        return hashlib.sha256(json.dumps(asked, default=str).encode()).hexdigest()[:16]


# ---- halving -----------------------------------------------------------------------------------------------------------


def halve(num: int, judge: Callable[[int], BisectTrial], *, ends_known: bool = False) -> BisectAnswer:
    """Find the neighbours of which one goes well and the next does not, among 0 … num - 1; `judge(place)` makes a trial.

    The ends are tried first unless they are known. A skipped trial is replaced by its nearest neighbour; where all between
    two places are skipped, they are `left`.
    """
    trials: dict[int, BisectTrial] = {}

    def outcome(place: int) -> TrialOutcome:
        if place not in trials:
            trials[place] = judge(place)
        return trials[place].outcome

    def answer(good: int | None, bad: int | None, left: Sequence[int] = ()) -> BisectAnswer:
        return BisectAnswer(trials=tuple(trials.values()), good=good, bad=bad, left=tuple(left))

    def untold(place: int) -> BisectAnswer | None:
        trial = trials[place]
        skipped = trial.outcome is TrialOutcome.SKIPPED
        return BisectAnswer(trials=tuple(trials.values()), untold=trial) if skipped else None

    low, high = 0, num - 1
    if not ends_known:
        if outcome(high) is not TrialOutcome.BAD:
            return untold(high) or answer(None, None)
        if outcome(low) is not TrialOutcome.GOOD:
            return untold(low) or answer(None, high)
    while high - low > 1:
        middle = (low + high) / 2
        order = sorted(range(low + 1, high), key=lambda place: (abs(place - middle), place))
        place = next((one for one in order if outcome(one) is not TrialOutcome.SKIPPED), None)
        if place is None:
            return answer(low, high, order)
        low, high = (place, high) if outcome(place) is TrialOutcome.GOOD else (low, place)
    return answer(low, high)


# ---- what is asked -----------------------------------------------------------------------------------------------------


def plan_bisect(
    settings: Settings,
    axis: Axis,
    asked: str,
    *,
    until: int | None,
    begin: int | None = None,
    launch: int | None = None,
    bad_if: str = "incident",
    judge: str = "",
    accept_unproved: str = "",
    command: Sequence[str] = (),
) -> Bisect:
    """Read the journal and the candidates. `asked`: GOOD..BAD, or the values with commas between them.

    Raises `UsageProblem` or `Refusal` with what is missing; nothing is started.
    """
    entries = read_journal(settings.paths).entries
    last = until if until is not None else _end_of_incident(entries)
    number = launch if launch is not None else _owner(entries, last)
    ends = _ends(axis, asked)
    lowest = {Axis.STEPS: int(float(ends[1])) + 1, Axis.DATA: int(float(ends[0]))} if axis in (Axis.STEPS, Axis.DATA) else {}
    before = begin + 1 if begin is not None else min(lowest.get(axis, last), last)
    origin = find_origin(settings, entries, number, before, again="chronicle bisect …", command=command)
    if begin is not None and origin.start != begin:
        raise Refusal(f"no verified checkpoint of step {begin}: the nearest before it is {origin.words}")
    if origin.start >= last:
        raise UsageProblem(f"--until is {last}: expected a step after {origin.start}, where the trials begin")
    rings = rings_of(settings.paths.launch_dir(number)) if bad_if == "differs" else {}
    if bad_if == "differs" and not rings:
        raise Refusal(f"launch {number} has no step prints: there is nothing that a trial could differ from")
    if bad_if not in ("incident", "differs"):
        _condition(bad_if)
    return Bisect(
        origin=origin,
        axis=axis,
        candidates=tuple(_candidates(origin, axis, asked, ends, entries, accept_unproved)),
        until=last,
        bad_if=bad_if,
        judge=judge,
        rings=rings,
    )


def _end_of_incident(entries: Sequence[Entry]) -> int:
    from chronicle.story.matters import collect_matters, event_of

    matters = [matter for matter in collect_matters(entries) if matter.open]
    steps = [event_of(matter.entry).alarm_step or matter.entry.step for matter in matters]
    found = [step for step in steps if step is not None]
    if not found:
        raise UsageProblem("--until is missing, and no incident is open", "name the step by which a trial has gone bad or well")
    return found[-1]


def _owner(entries: Sequence[Entry], step: int) -> int:
    lineage = compute_lineage(entries)
    number = lineage.owner(step) or lineage.head_launch
    if number is None:
        raise Refusal("the run has no launch that could be started again")
    return number


def _ends(axis: Axis, asked: str) -> tuple[str, str]:
    if axis in (Axis.VALUES, Axis.AMONG):
        return "", ""
    first, dots, last = (part.strip() for part in asked.partition(".."))
    if not (dots and first and last):
        raise UsageProblem(f"--{axis} {asked}: expected GOOD..BAD, as in --{axis} {_EXAMPLES[axis]}")
    if axis is not Axis.COMMITS:
        try:
            low, high = float(first), float(last)
        except ValueError:
            raise UsageProblem(f"--{axis} {asked}: expected two numbers, as in {_EXAMPLES[axis]}") from None
        if not (0 < low < math.inf and 0 < high < math.inf) or low == high:
            raise UsageProblem(f"--{axis} {asked}: expected two different numbers above 0")
        if axis is not Axis.LR and (low > high or low != int(low) or high != int(high)):
            raise UsageProblem(f"--{axis} {asked}: expected two whole steps, the earlier one first")
    return first, last


_EXAMPLES = {Axis.COMMITS: "v1.2..HEAD", Axis.STEPS: "400..900", Axis.LR: "0.1..2", Axis.DATA: "480..500"}


def _candidates(
    origin: Origin, axis: Axis, asked: str, ends: tuple[str, str], entries: Sequence[Entry], accept_unproved: str
) -> Iterator[Candidate]:
    if axis in (Axis.VALUES, Axis.AMONG):
        values = [value.strip() for value in asked.split(",") if value.strip()]
        if len(set(values)) != len(values) or len(values) < 2:
            raise UsageProblem(f"--{axis} {asked}: expected two or more different values with commas between them")
        if not any("{}" in word for word in origin.command):
            raise UsageProblem(f"--{axis}: the command has no {{}} for the value", "give it after `--`, with {} in its place")
        for value in values:
            yield Candidate(name=value, change=_command(origin, [value]))
    elif axis is Axis.COMMITS:
        top = top_of(origin.cwd)
        listed = None if top is None else commits_between(origin.cwd, *ends)
        if top is None or listed is None:
            raise UsageProblem(f"--commits {asked}: git knows no commits between them in `{origin.cwd}`")
        for name, subject in listed:
            code = CodeChange(top=str(top), commit=name)
            yield Candidate(name=name[:12], change=ForkChange(code=code), words=f" ({subject})")
    elif axis is Axis.STEPS:
        first, last = (int(float(end)) for end in ends)
        found = [one for one in as_recorded(origin, entries) if first <= one[0] <= last and usable(one[1], entries)]
        if len(found) < 2:
            raise Refusal(f"--steps {asked}: {len(found)} verified checkpoints lie between them, two or more are needed")
        for one in found:
            yield Candidate(name=str(one[0]), begin=one)
    elif axis is Axis.LR:
        low, high = (float(end) for end in ends)
        more = ("--accept-unproved", accept_unproved) if accept_unproved else ()
        num = max(1, math.ceil(abs(math.log(high / low)) / math.log(FINEST)))
        for place in range(num + 1):
            scale = float(f"{low * (high / low) ** (place / num):.3g}")
            yield Candidate(name=f"{scale:g}", change=ForkChange(rollback=("--lr-scale", f"{scale:g}", *more)))
    else:
        first, last = (int(float(end)) for end in ends)
        for step in range(last, first - 2, -1):  # with all of it skipped it goes well
            skipped = step - origin.start
            change = ForkChange(rollback=("--skip-batches", str(skipped))) if skipped > 0 else ForkChange()
            yield Candidate(name=str(step), change=change)


def _command(origin: Origin, values: Sequence[str]) -> ForkChange:
    return ForkChange(command=tuple(word.replace("{}", ",".join(values)) for word in origin.command))


# ---- the trials --------------------------------------------------------------------------------------------------------


def run_bisect(
    asked: Bisect, *, sandbox: Path | None = None, ends_known: bool = False, say: Say = lambda line: None
) -> tuple[BisectAnswer, Entry]:
    """Try candidates until the change is found; the answer and its entry. Raises `ChronicleError` where none can be started."""
    begun = time.monotonic()
    settings = asked.origin.settings
    entries = read_journal(settings.paths).entries
    known = {event.change: event for _, event in events_of(entries, Tried) if event.search == asked.digest}
    made = 0

    def judge(candidate: Candidate) -> BisectTrial:
        nonlocal made
        made += 1
        trial = _known(candidate, known) or _try(asked, candidate, sandbox)
        note = ", tried before" if trial.known else ""
        say(f"trial {made}: {asked.axis} {candidate.name}: {trial.outcome} ({trial.why}{note})")
        if not trial.known:
            _record(asked, trial)
        return trial

    if asked.axis is Axis.AMONG:
        answer = _among(asked, judge)
    else:
        answer = halve(len(asked.candidates), lambda place: judge(asked.candidates[place]), ends_known=ends_known)
    event = Searched(
        axis=asked.axis.value,
        search=asked.digest,
        answer=sentence(asked, answer),
        found=answer.good is not None and answer.bad is not None and not answer.left,
        rows=tuple({"change": one.name, "verdict": one.outcome.value, "why": one.why, "loss": one.loss,
                    "last_step": one.last_step} for one in answer.trials),
        until=asked.until,
        start=asked.origin.start,
        seconds=round(time.monotonic() - begun, 1),
    )  # fmt: skip
    with JournalWriter(settings.paths) as writer:
        entry = writer.write(event, launch=asked.origin.launch, step=asked.until, title=f"bisect: {event.answer}")
    return answer, entry


def _among(asked: Bisect, judge: Callable[[Candidate], BisectTrial]) -> BisectAnswer:
    """The member that makes a trial bad: half of those that are left, again and again, and the last one by itself."""
    trials: list[BisectTrial] = []
    names = [one.name for one in asked.candidates]

    def outcome(members: Sequence[str]) -> TrialOutcome:
        trials.append(judge(Candidate(name=",".join(members), change=_command(asked.origin, members))))
        return trials[-1].outcome

    whole = outcome(names)
    if whole is not TrialOutcome.BAD:
        untold = trials[-1] if whole is TrialOutcome.SKIPPED else None
        return BisectAnswer(trials=tuple(trials), untold=untold)
    left = names
    while len(left) > 1:
        half, other = left[: len(left) // 2], left[len(left) // 2 :]
        first = outcome(half)
        if first is TrialOutcome.SKIPPED:
            break
        left = half if first is TrialOutcome.BAD else other
    alone = len(left) == 1 and (trials[-1].name == left[0] or outcome(left) is TrialOutcome.BAD)
    place = names.index(left[0])
    places = tuple(names.index(name) for name in left)
    return BisectAnswer(trials=tuple(trials), bad=place, good=place if alone else None, left=() if alone else places)


def _known(candidate: Candidate, known: Mapping[str, Tried]) -> BisectTrial | None:
    event = known.get(candidate.name)
    if event is None:
        return None
    outcome, last, loss = TrialOutcome(event.verdict), event.last_step, event.loss
    return BisectTrial(name=candidate.name, outcome=outcome, why=event.why, last_step=last, loss=loss, known=True)


def _try(asked: Bisect, candidate: Candidate, sandbox: Path | None) -> BisectTrial:
    begun = time.monotonic()
    origin = asked.origin if candidate.begin is None else begin_at(asked.origin, candidate.begin)
    ranks = sorted(asked.rings)
    scan = asked.bad_if == "incident" and not asked.judge
    with play(
        origin, asked.until, sandbox=sandbox, ranks=ranks, change=candidate.change, purpose="trial", scan=scan
    ) as forked:
        outcome, why = _judged(asked, candidate, origin, forked)
        last, loss = forked.last_step, forked.losses[-1][1] if forked.losses else None
    seconds = time.monotonic() - begun
    return BisectTrial(name=candidate.name, outcome=outcome, why=why, last_step=last, loss=loss, seconds=seconds)


def _judged(asked: Bisect, candidate: Candidate, origin: Origin, forked: Forked) -> tuple[TrialOutcome, str]:
    if asked.judge:
        return _by_command(asked.judge, candidate, forked)
    if asked.bad_if == "differs":
        return _by_prints(asked, origin, forked)
    if not forked.losses:
        return TrialOutcome.SKIPPED, f"no loss was logged ({forked.why_ended})"
    step, loss = forked.losses[-1]
    if not math.isfinite(loss):
        return TrialOutcome.BAD, f"the loss is {loss} at step {step}"
    if asked.bad_if != "incident":
        sign, limit = _condition(asked.bad_if)
        tail = [loss for _, loss in forked.losses[-max(1, len(forked.losses) // 10) :]]
        mean = math.fsum(tail) / len(tail)
        bad = mean > limit if sign == ">" else mean < limit
        said = f"loss {mean:.4g} at step {step}" if len(tail) == 1 else f"loss {mean:.4g}, mean of the last {len(tail)} logged"
        return (TrialOutcome.BAD if bad else TrialOutcome.GOOD), said
    if forked.warned:
        return TrialOutcome.BAD, f"{forked.warned}, loss {loss:.4g}"
    if forked.last_step is None or forked.last_step < asked.until:
        return TrialOutcome.BAD, f"it ended at step {forked.last_step}: {forked.why_ended}"
    return TrialOutcome.GOOD, f"loss {loss:.4g} at step {step}"


def _condition(text: str) -> tuple[str, float]:
    """`loss > 3.2` as its sign and number. Raises `UsageProblem`."""
    found = re.fullmatch(r"\s*loss\s*([<>])\s*([-+.\deE]+)\s*", text)
    try:
        limit = float(found[2]) if found else math.nan
    except ValueError:
        limit = math.nan
    if found is None or not math.isfinite(limit):
        raise UsageProblem(f"--bad-if {text}: expected incident, differs, or a condition such as 'loss > 3.2'")
    return found[1], limit


def _by_prints(asked: Bisect, origin: Origin, forked: Forked) -> tuple[TrialOutcome, str]:
    rings = rings_of(forked.directory / "launch")
    record = {rank: {**{one.step: one for one in ring.begins()}, **ring.steps()} for rank, ring in asked.rings.items()}
    begins = {rank: rows[-1] for rank, ring in rings.items() if (rows := ring.begins())}
    found = compare_prints(
        record, {rank: ring.steps() for rank, ring in rings.items()}, start=origin.start, until=asked.until, begins=begins
    )
    if found.first is not None:
        return TrialOutcome.BAD, f"differs: {found.first.words}"
    if not found.steps or found.missing:
        return TrialOutcome.SKIPPED, f"no step could be compared ({forked.why_ended})"
    return TrialOutcome.GOOD, f"{len(found.steps)} steps equal to the record"


def _by_command(command: str, candidate: Candidate, forked: Forked) -> tuple[TrialOutcome, str]:
    """Code 0: good; 125: cannot tell; below 128: bad. It reads `$CHRONICLE_TRIAL/metrics.jsonl`."""
    environ = {**os.environ, "CHRONICLE_TRIAL": str(forked.directory / "launch"), "CHRONICLE_TRIAL_VALUE": candidate.name}
    done = subprocess.run(command, shell=True, env=environ, capture_output=True, text=True, check=False)  # noqa: S602
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    why = f"code {done.returncode}" + (f": {said[-1][:120]}" if said else "")
    if done.returncode in (126, 127) or done.returncode >= 128 or done.returncode < 0:
        raise ChronicleError(f"the judge `{command}` failed: {why}", "0: good, 125: cannot tell, other codes up to 124: bad")
    if done.returncode == SKIPPED_CODE:
        return TrialOutcome.SKIPPED, why
    return (TrialOutcome.GOOD if done.returncode == 0 else TrialOutcome.BAD), why


def _record(asked: Bisect, trial: BisectTrial) -> None:
    event = Tried(
        search=asked.digest,
        change=trial.name,
        verdict=trial.outcome.value,
        why=trial.why,
        start=asked.origin.start,
        last_step=trial.last_step,
        loss=trial.loss,
        seconds=round(trial.seconds, 1),
    )
    title = f"trial: {asked.axis} {trial.name}: {trial.outcome} ({trial.why})"
    with JournalWriter(asked.origin.settings.paths) as writer:
        writer.write(event, launch=asked.origin.launch, step=trial.last_step, title=title)


# ---- the answer --------------------------------------------------------------------------------------------------------


_WORDS = {
    Axis.COMMITS: "with commit {}",
    Axis.STEPS: "from the checkpoint of step {}",
    Axis.LR: "with LR x {}",
    Axis.DATA: "with the data up to step {} skipped",
    Axis.VALUES: "with {}",
    Axis.AMONG: "with {}",
}


def sentence(asked: Bisect, answer: BisectAnswer) -> str:
    """What was found, in one sentence."""
    names = [one.name for one in asked.candidates]
    words = [_WORDS[asked.axis].format(name) for name in names]
    if answer.untold is not None:
        which = _WORDS[asked.axis].format(answer.untold.name)
        return f"nothing was found: the trial {which} could not be judged: {answer.untold.why}"
    if answer.bad is None:
        which = f"with all of {', '.join(names)}" if asked.axis is Axis.AMONG else words[-1]
        return f"{which} it goes well, too: the cause is not there, or it is not repeatable"
    if answer.left:
        rest = ", ".join(names[place] for place in sorted(answer.left))
        more = "" if asked.axis is Axis.AMONG else f", {names[answer.bad]}"
        return f"the cause is one of {rest}{more}: they cannot be told apart"
    if answer.good is None:
        return f"{words[0]} it goes bad, too: the cause lies before it, or elsewhere"
    good, bad = names[answer.good], names[answer.bad]
    if asked.axis is Axis.AMONG:
        return f"{bad} makes it bad, also alone"
    if asked.axis is Axis.COMMITS:
        return f"{bad}{asked.candidates[answer.bad].words} is the first bad commit; {good} goes well"
    if asked.axis is Axis.DATA:
        return f"it goes well once the batch of step {good} is skipped: the cause is in that batch"
    return f"{words[answer.good]} it goes well, {words[answer.bad]} it does not"
