"""One replay: where it begins, what it starts, how its prints compare with the record, and the entry about it.

A replay is planned from the journal and the prints: the launch whose step it is, and the nearest verified checkpoint that
this launch saved, or began from (`origin.py`). The recorded command is then started in a copy of what it needs (`replica.py`),
cut off (`closed.py`), stopped after the last step, compared print by print (`played.py`), and judged (`verdict.py`). Where only
a second play can tell, there is one; there are never more. What is missing for any of this is named, and nothing is started.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from chronicle.errors import Refusal, UsageProblem
from chronicle.journal import Entry, JournalWriter, compute_lineage, read_journal
from chronicle.journal.events import EntryKind, Replayed
from chronicle.launch.launchers import build_environment
from chronicle.paths import list_launch_numbers
from chronicle.prints.compared import PrintComparison
from chronicle.replay.closed import ensure_network_closes, landlock_version
from chronicle.replay.origin import Origin, find_origin, is_recorded, start_of
from chronicle.replay.played import Played, ReplayPlan, play_once
from chronicle.replay.verdict import ReplayCase, Ruling, StateLoaded, judge_replay, state_loaded
from chronicle.resume.checks.check import Outcome
from chronicle.resume.launch_facts import changed_facts, digests_of, holds_data, new_sources, read_facts
from chronicle.resume.ring import Ring, rings_of
from chronicle.settings import Settings

MOST_PASSED_BY = 3
MOST_VARIABLES = 8
OF_FILES = ("file", "doubt")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What came out."""

    plan: ReplayPlan
    judged: Ruling
    comparison: PrintComparison
    replays: int
    seconds: float


# ---- the plan ----------------------------------------------------------------------------------------------------------


def plan_replay(
    settings: Settings,
    step: int,
    *,
    launch: int | None = None,
    until: int | None = None,
    command: Sequence[str] = (),
    network: bool = False,
    scratch: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ReplayPlan:
    """Plan the replay of a step. Raises `Refusal` or `UsageProblem` with the missing piece; nothing is started."""
    if step < 1:
        raise UsageProblem(f"step is {step}: expected 1 or more", "steps count completed optimizer steps")
    if until is not None and until < step:
        raise UsageProblem(f"--until is {until}: expected {step} or more")
    entries = read_journal(settings.paths).entries
    number, rings = _launch_of(settings, entries, step, launch)
    last = until or _next_print(rings, step)
    if rings[min(rings)].header.get("ranks") != len(rings):
        asked = rings[min(rings)].header.get("ranks")
        raise Refusal(f"launch {number} had {asked} ranks, and prints of {len(rings)} are here")
    ensure_replayable(entries, number, command, network=network)
    origin = find_origin(settings, entries, number, step, command, environ)
    return ReplayPlan(origin=origin, step=step, until=last, rings=rings, network=network, scratch=scratch)


def ensure_replayable(
    entries: Sequence[Entry], number: int, command: Sequence[str] = (), *, network: bool = False
) -> None:
    """Raise `Refusal` or `UsageProblem` where a launch cannot be replayed here, as far as the journal and this machine tell."""
    start_of(entries, number, command)
    if not network:
        ensure_network_closes()


def _launch_of(
    settings: Settings, entries: Sequence[Entry], step: int, launch: int | None
) -> tuple[int, Mapping[int, Ring]]:
    """The launch whose step it is, and its prints."""
    holders: dict[int, Mapping[int, Ring]] = {}
    for number in [launch] if launch is not None else list_launch_numbers(settings.paths):
        rings = rings_of(settings.paths.launch_dir(number))
        if rings and _next_print_or_none(rings, step) is not None:
            holders[number] = rings
    if not holders:
        where = f"launch {launch}" if launch is not None else f"run {settings.run}"
        numbers = [launch] if launch is not None else list_launch_numbers(settings.paths)
        newest = max((last for n in numbers if (last := _last_print(settings.paths.launch_dir(n))) is not None), default=None)
        raise Refusal(
            f"{where} has no prints of step {step} or after it, so there is nothing to compare a replay with"
            + ("" if newest is None else f"; the last step that all its ranks printed is {newest}"),
            "step prints are made by guarded launches under `chronicle run` (docs/replay.md)"
            if newest is None
            else "where steps are short not every one is printed; `CHRONICLE_PRINTS=every` prints every step of a launch",
        )
    owner = compute_lineage(entries).owner(step)
    if launch is None and owner in holders:
        return owner, holders[owner]
    if len(holders) > 1:
        raise UsageProblem(
            f"step {step} was taken by launches {', '.join(map(str, holders))}, none of them in the present lineage",
            f"name one: --launch {max(holders)}",
        )
    return next(iter(holders.items()))


def _last_print(launch_dir: Path) -> int | None:
    """The last step that all ranks of a launch printed; None without prints."""
    rings = rings_of(launch_dir)
    return max(_printed_by_all(rings), default=None) if rings else None


def _printed_by_all(rings: Mapping[int, Ring]) -> set[int]:
    return set.intersection(*(set(ring.steps()) for ring in rings.values()))


def _next_print_or_none(rings: Mapping[int, Ring], step: int) -> int | None:
    """The first printed step of all ranks that is not before `step`, where prints before it or a beginning are there, too."""
    common = _printed_by_all(rings)
    begins = min((one.step for ring in rings.values() for one in ring.begins()), default=min(common, default=0))
    return min((one for one in common if one >= step), default=None) if begins < step else None


def _next_print(rings: Mapping[int, Ring], step: int) -> int:
    found = _next_print_or_none(rings, step)
    assert found is not None
    return found


# ---- the replay --------------------------------------------------------------------------------------------------------


def replay(plan: ReplayPlan, *, say: Say = lambda line: None) -> Replay:
    """Play it, a second time where only that can tell, and judge. Raises `ChronicleError` when it could not be played."""
    begun = time.monotonic()
    record = {rank: {**{one.step: one for one in ring.begins()}, **ring.steps()} for rank, ring in plan.rings.items()}
    facts = read_facts(plan.origin.settings.paths.launch_dir(plan.origin.launch))
    for line in _said_before(plan, facts):
        say(line)
    one = play_once(plan)
    comparison = one.compare(record, plan.until)
    case = ReplayCase(
        compared=comparison,
        changed=_changed(facts, one, plan),
        facts_known=facts is not None and one.facts is not None,
        load=_state_loaded(plan.origin, one),
        has_checkpoint=plan.origin.begin is not None,
    )
    judged, replays = judge_replay(case), 1
    if judged.again and comparison.first is not None:
        say(f"{comparison.first.words}: another replay tells whether it is repeatable")
        two, replays = play_once(plan), 2
        judged = judge_replay(replace(case, plays_agree=plays_agree(case, one, two)))
    judged = replace(judged, evidence=(*judged.evidence, *_beside(plan.origin, one)))
    return Replay(plan=plan, judged=judged, comparison=comparison, replays=replays, seconds=time.monotonic() - begun)


def plays_agree(case: ReplayCase, one: Played, two: Played) -> bool | None:
    """Whether two plays are equal; of a launch that made its weights by itself, whether both began with the same ones."""
    if case.began_anew_with_other_weights():
        return one.begins_as(two)
    return one.agrees_with(two)


def _said_before(plan: ReplayPlan, facts: Mapping[str, Any] | None) -> Iterator[str]:
    """What is started, and what is known to be otherwise here, or open."""
    origin = plan.origin
    yield f"launch {origin.launch} again from {origin.words}, to step {plan.until}; twice where only that can tell"
    here = digests_of(build_environment(origin.environ, {}, 0.0))
    then: Mapping[str, str] = {} if facts is None else facts["environment"]
    missing = [name for name in sorted(then.keys() - here.keys()) if not is_recorded(name)]
    others = [name for name in sorted(then.keys() & here.keys()) if then[name] != here[name] and not is_recorded(name)]
    for names, what in ((missing, "not set here, and set in that launch"), (others, "set otherwise than in that launch")):
        if names:
            yield f"variables {what} (values are not recorded): {', '.join(names[:MOST_VARIABLES])}"
    if landlock_version() == 0:
        yield "this kernel has no Landlock: what the script names by its whole path, it writes there"


def _beside(origin: Origin, one: Played) -> Iterator[str]:
    """What a reader has to know of how it was played."""
    if one.start < origin.start:
        yield _began_earlier(one.start, origin)
    restored = [name for name, value in sorted(os.environ.items()) if is_recorded(name) and origin.environ.get(name) != value]
    if restored:
        yield f"set as in the record, and otherwise than here: {', '.join(restored[:MOST_VARIABLES])}"
    different = [check for verdict in one.guard for check in verdict.checks if check.get("outcome") == Outcome.DIFFERENT]
    yield from (f"its guard: {check['name']}: {check['found']} ({check.get('cause') or check['code']})" for check in different)
    yield from (f"a nearer checkpoint was passed by: {words}" for words in origin.passed_by[:MOST_PASSED_BY])


def _changed(facts: Mapping[str, Any] | None, one: Played, plan: ReplayPlan) -> list[tuple[str, str]]:
    """(kind, words) of what is known to be otherwise in this replay.

    Of the run's own files (what a save writes and reads) nothing is said: a replay has others.
    """
    if facts is None or one.facts is None:
        return []
    ended = _end_of(plan.origin)
    own = [os.path.realpath(path) for path in plan.origin.own]
    is_own = partial(_is_own, own, os.path.realpath(plan.origin.cwd))
    items = [item for item in changed_facts(facts, one.facts, ended) if item.kind not in OF_FILES or not is_own(item.name)]
    items += new_sources(facts, one.facts, ended)
    return [("data" if holds_data(item) else item.kind, item.words) for item in items]


def _is_own(own: Sequence[str], cwd: str, name: str) -> bool:
    """Whether a file is the run's own, or this is a directory that leads to it (a save opens it, to write it through)."""
    real = os.path.realpath(name)
    if any(real == one or real.startswith(one + os.sep) for one in own):
        return True
    return real != cwd and os.path.isdir(real) and any(one.startswith(real + os.sep) for one in own)


def _began_earlier(start: int, origin: Origin) -> str:
    """That a replay took more steps than it had to, and what to do about it."""
    words = f"the command began at step {start}, and not from {origin.words}: it may resume only with other words (give the "
    earlier = f", or this checkpoint holds the state of step {start}" if start else ""
    return f"{words}whole command after `--`){earlier}"


def _state_loaded(origin: Origin, one: Played) -> StateLoaded:
    """What the guard found at the load. A checkpoint that the recorded launch loaded itself is what it began with."""
    number = origin.launch
    if origin.begin is None or origin.begin.identity.get("launch", origin.begin.checkpoint.launch) != number:
        return StateLoaded()
    return state_loaded(one.guard)


def _end_of(origin: Origin) -> float | None:
    """When the recorded launch ended, in seconds since the epoch; None where the journal does not tell."""
    entries = [entry for entry in read_journal(origin.settings.paths).entries if entry.launch == origin.launch]
    ends = [entry.ts for entry in entries if entry.kind == EntryKind.LAUNCH_END]
    return datetime.fromisoformat(ends[-1]).timestamp() if ends else None


# ---- the entry ---------------------------------------------------------------------------------------------------------


def record_replay(found: Replay) -> Entry:
    """Write the entry about a replay into the journal of the run: all that a replay leaves there."""
    plan, judged, origin = found.plan, found.judged, found.plan.origin
    event = Replayed(
        verdict=judged.verdict.value,
        why=judged.why,
        evidence=judged.evidence,
        until=plan.until,
        start=origin.start,
        checkpoint=None if origin.begin is None else str(origin.begin.checkpoint.path),
        identity={} if origin.begin is None else dict(origin.begin.identity),
        compared=len(found.comparison.steps),
        parts=tuple(sorted(found.comparison.parts)),
        replays=found.replays,
        seconds=round(found.seconds, 1),
    )
    title = f"replay of step {plan.step}: {judged.verdict.value} ({judged.why})"
    with JournalWriter(origin.settings.paths) as writer:
        return writer.write(event, launch=origin.launch, step=plan.step, title=title)
