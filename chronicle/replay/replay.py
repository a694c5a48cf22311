"""One replay: the command of a plan in a replica of the run, its prints beside the record, the verdict, and the entry about it.

A replay is planned from the journal and the prints (`plan.py`). The recorded command is then started in a copy of what it needs
(`replica.py`), cut off (`closed.py`), stopped after the last step, compared print by print, and judged (`verdict.py`). Where
only a second play can tell, there is one; there are never more.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.journal import Entry, JournalWriter, read_journal
from chronicle.journal.events import GuardVerdict, LaunchEnd, Replayed, events_of
from chronicle.launch.launchers import build_environment
from chronicle.paths import list_launch_numbers
from chronicle.prints.compared import RESULT, Prints, compare_prints
from chronicle.prints.launch_facts import changed_facts, digests_of, holds_data, read_facts
from chronicle.prints.ring import Print, Ring, rings_of
from chronicle.rehearse.launches import Until, play
from chronicle.replay.closed import landlock_version
from chronicle.replay.plan import Plan, is_recorded
from chronicle.replay.replica import Replica
from chronicle.replay.verdict import ReplayCase, Ruling, StateLoaded, judge_replay, state_loaded
from chronicle.resume.checks.check import Outcome

MOST_PASSED_BY = 3
MOST_VARIABLES = 8
NO_STEP = 1 << 32  # no launch comes to it
OPTIONS = ("--force", "a replay in a scratch directory", "--grace", "10")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One play."""

    prints: Prints
    begins: Mapping[int, Print]  # by rank: the weights that it began with
    start: int
    facts: Mapping[str, Any] | None
    guard: Sequence[GuardVerdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What came out."""

    plan: Plan
    judged: Ruling
    case: ReplayCase
    replays: int
    seconds: float


def replay(plan: Plan, *, say: Say = lambda line: None) -> Replay:
    """Play it, a second time where only that can tell, and judge. Raises `ChronicleError` when it could not be played."""
    begun = time.monotonic()
    facts = read_facts(plan.settings.paths.launch_dir(plan.launch))
    for line in _said_before(plan, facts):
        say(line)
    one = play_once(plan)
    record = {rank: _by_step(ring) for rank, ring in plan.rings.items()}
    compared = compare_prints(record, one.prints, start=one.start, until=plan.until, begins=one.begins)
    was_loaded = plan.begin is None or plan.begin.launch != plan.launch  # by the recorded launch, too
    case = ReplayCase(
        ranks=compared.ranks,
        changed=_changed(facts, one, plan),
        facts_known=facts is not None and one.facts is not None,
        has_checkpoint=plan.begin is not None,
        load=StateLoaded() if was_loaded else state_loaded(one.guard),
    )
    judged, replays = judge_replay(case), 1
    if judged.again and case.first is not None:
        say(f"{case.first.words}: another replay tells whether it is repeatable")
        replays = 2
        case = replace(case, plays_agree=plays_agree(case, one, play_once(plan)))
        judged = judge_replay(case)
    judged = replace(judged, evidence=(*judged.evidence, *_beside(plan, one)))
    return Replay(plan=plan, judged=judged, case=case, replays=replays, seconds=time.monotonic() - begun)


def plays_agree(case: ReplayCase, one: Played, two: Played) -> bool | None:
    """Whether two plays tell the same of what differs from the record; None: nothing could be compared.

    All steps count: noise that seldom shows may show behind the first difference. Noise in results says nothing of what enters.
    """
    both = compare_prints(one.prints, two.prints, start=max(one.start, two.start), until=NO_STEP, begins=two.begins)
    if case.began_anew or not both.steps:
        return both.begins_equal
    return both.first is None or (case.enters and both.part in RESULT)


def _by_step(ring: Ring) -> dict[int, Print]:
    """Its prints, those of beginnings where there is none of the step itself."""
    return {one.step: one for one in ring.begins()} | ring.steps()


# ---- a play ------------------------------------------------------------------------------------------------------------


def play_once(plan: Plan) -> Played:
    """Play the steps of a plan; what it writes is removed. Raises `ChronicleError` where it could not be started."""
    if plan.scratch is not None:
        plan.scratch.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="chronicle-replay-", dir=plan.scratch)).resolve()
    try:
        return _play(plan, Replica(name=plan.settings.run, scratch=scratch, plan=plan))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _play(plan: Plan, replica: Replica) -> Played:
    replica.prepare()
    launch_dir = replica.paths.launch_dir(max(list_launch_numbers(replica.paths), default=0) + 1)

    def is_over() -> bool:
        """Whether a step after the last one is printed: where its generators stand tells of the step before."""
        try:
            rings = rings_of(launch_dir)
        except ChronicleError:
            return False  # it is being made
        return all(rank in rings and max(rings[rank].steps(), default=0) > plan.until for rank in plan.rings)

    closed = json.dumps({"network": plan.network, "writable": replica.writable(), "parent": os.getpid()})
    played = play(
        replica,
        [replica.told(word) for word in plan.command],
        replica.environment(),
        Until(step=NO_STEP, is_over=is_over),
        before=(sys.executable, "-m", "chronicle.replay.closed", closed),
        options=OPTIONS,
    )
    rings = rings_of(launch_dir)
    if not rings:
        log = launch_dir / "supervisor.log"
        last = log.read_text(errors="replace").strip().splitlines()[-6:] if log.exists() else []
        raise ChronicleError(
            f"the replay took no step that could be compared ({played.end}): {' / '.join(last)[-600:]}",
            "a replay is cut off from the network: where the script reads from it, --network lets it",
        )
    begins: dict[int, Print] = {}
    for rank, ring in rings.items():
        before = [one for one in ring.begins() if one.step < plan.step]
        if not before:
            raise ChronicleError(
                f"the replay began with step {ring.begins()[0].step + 1}, after the one that was asked for: the script took a "
                "checkpoint by itself",
                "say where its checkpoints lie: --checkpoints DIR",
            )
        begins[rank] = before[-1]
    return Played(
        prints={rank: _by_step(ring) for rank, ring in rings.items()},
        begins=begins,
        start=max(one.step for one in begins.values()),
        facts=_facts_of(replica, launch_dir),
        guard=played.guard,
    )


def _facts_of(replica: Replica, launch_dir: Path) -> dict[str, Any] | None:
    """What the play was made by, with the names that its files have outside of the scratch directory."""
    facts = read_facts(launch_dir)
    if facts is None:
        return None
    told = {table: {replica.untold(path): digest for path, digest in facts[table].items()} for table in ("code", "files")}
    rewritten = replica.rewritten()
    environment = {name: digest for name, digest in facts["environment"].items() if name not in rewritten}
    return {**facts, **told, "environment": environment}


# ---- what is said beside it --------------------------------------------------------------------------------------------


def _said_before(plan: Plan, facts: Mapping[str, Any] | None) -> Iterator[str]:
    """What is started, and what is known to be otherwise here, or open."""
    yield f"launch {plan.launch} again from {plan.words}, to step {plan.until}; twice where only that can tell"
    here = digests_of(build_environment(plan.environ, {}, 0.0))
    then: Mapping[str, str] = {} if facts is None else facts["environment"]
    own = [name for name in sorted(then) if not is_recorded(name)]
    missing = [name for name in own if name not in here]
    others = [name for name in own if name in here and then[name] != here[name]]
    for names, what in ((missing, "not set here, and set in that launch"), (others, "set otherwise than in that launch")):
        if names:
            yield f"variables {what} (values are not recorded): {', '.join(names[:MOST_VARIABLES])}"
    if landlock_version() == 0:
        yield "this kernel has no Landlock: what the script names by its whole path, it writes there"


def _beside(plan: Plan, one: Played) -> Iterator[str]:
    """What a reader has to know of how it was played."""
    if one.start < plan.start:
        also = f", or this checkpoint holds the state of step {one.start}" if one.start else ""
        yield (
            f"the command began at step {one.start}, and not from {plan.words}: it may resume only with other words (give the "
            f"whole command after `--`){also}"
        )
    restored = [name for name, value in sorted(os.environ.items()) if is_recorded(name) and plan.environ.get(name) != value]
    if restored:
        yield f"set as in the record, and otherwise than here: {', '.join(restored[:MOST_VARIABLES])}"
    different = [check for verdict in one.guard for check in verdict.checks if check.get("outcome") == Outcome.DIFFERENT]
    yield from (f"its guard: {check['name']}: {check['found']} ({check.get('cause') or check['code']})" for check in different)
    yield from (f"a nearer checkpoint was passed by: {words}" for words in plan.passed_by[:MOST_PASSED_BY])


def _changed(facts: Mapping[str, Any] | None, one: Played, plan: Plan) -> list[tuple[str, str]]:
    """(kind, words) of what is known to be otherwise in this replay.

    Of the run's own files (what a save writes and reads) nothing is said: a replay has others.
    """
    if facts is None or one.facts is None:
        return []
    entries = read_journal(plan.settings.paths).entries
    ends = [entry.ts for entry, _ in events_of(entries, LaunchEnd) if entry.launch == plan.launch]
    ended = datetime.fromisoformat(ends[-1]).timestamp() if ends else None
    own = [Path(os.path.realpath(path)) for path in plan.own]
    found = []
    for item in changed_facts(facts, one.facts, ended):
        is_file = item.kind in ("file", "doubt")
        if is_file and any(Path(os.path.realpath(item.name)).is_relative_to(place) for place in own):
            continue
        found.append(("data" if holds_data(item) else item.kind, item.words))
    return found


def record_replay(found: Replay) -> Entry:
    """Write the entry about a replay into the journal of the run: all that a replay leaves there."""
    plan, judged = found.plan, found.judged
    event = Replayed(
        verdict=judged.verdict.value,
        why=judged.why,
        evidence=judged.evidence,
        until=plan.until,
        start=plan.start,
        checkpoint=None if plan.begin is None else str(plan.begin.checkpoint.path),
        identity={} if plan.begin is None else dict(plan.begin.identity),
        compared=len(found.case.steps),
        parts=tuple(sorted(found.case.parts)),
        replays=found.replays,
        seconds=round(found.seconds, 1),
    )
    title = f"replay of step {plan.step}: {judged.verdict.value} ({judged.why})"
    with JournalWriter(plan.settings.paths) as writer:
        return writer.write(event, launch=plan.launch, step=plan.step, title=title)
