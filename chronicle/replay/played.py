"""One play of recorded steps: the command in a replica of the run, stopped after the last step, and what it left.

Two plays of the same steps tell whether anything is repeatable.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.journal.events import GuardVerdict
from chronicle.paths import RunPaths, list_launch_numbers
from chronicle.prints.compared import PrintComparison, Prints, compare_prints, prints_agree, step_that_tells
from chronicle.rehearse.launches import Until, play
from chronicle.replay.origin import Origin
from chronicle.replay.replica import Replica
from chronicle.resume.launch_facts import read_facts
from chronicle.resume.ring import Print, Ring, rings_of

NO_STEP = 1 << 32  # no launch comes to it
OPTIONS = ("--force", "a replay in a scratch directory", "--grace", "10")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """What a replay will do. `network`: the script may reach it. `scratch`: where it writes; None: the temporary directory."""

    origin: Origin
    step: int
    until: int
    rings: Mapping[int, Ring]
    network: bool = False
    scratch: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One play."""

    prints: Prints
    begins: Mapping[int, Print]  # by rank: the weights that it began with
    start: int
    facts: Mapping[str, Any] | None
    guard: Sequence[GuardVerdict]

    def compare(self, record: Prints, until: int) -> PrintComparison:
        """With the record, up to this step."""
        return compare_prints(record, self.prints, start=self.start, until=until, begins=self.begins)

    def begins_as(self, other: "Played") -> bool:
        """Whether both began with the same weights."""
        return all(self.begins[rank].weights == other.begins[rank].weights for rank in self.begins)

    def steps_with(self, other: "Played") -> tuple[int, ...]:
        """Steps of which both have prints of all ranks: noise that seldom shows may show behind the first difference."""
        rows = [set(rank) for played in (self, other) for rank in played.prints.values()]
        return tuple(sorted(step for step in set.intersection(*rows) if step > max(self.start, other.start)))

    def agrees_with(self, other: "Played") -> bool | None:
        """Whether both are equal in the steps that both have; None: nothing could be compared."""
        return prints_agree(self.prints, other.prints, self.steps_with(other))


def play_once(plan: ReplayPlan) -> Played:
    """Play the steps of a plan; what it writes is removed. Raises `ChronicleError` where it could not be started."""
    if plan.scratch is not None:
        plan.scratch.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="chronicle-replay-", dir=plan.scratch)).resolve()
    try:
        return _play(plan, Replica(name=plan.origin.settings.run, scratch=scratch, origin=plan.origin))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _play(plan: ReplayPlan, replica: Replica) -> Played:
    # the next step that tells it, too: whether its generators stand elsewhere tells of the step before
    until = step_that_tells({rank: ring.steps() for rank, ring in plan.rings.items()}, plan.until) or plan.until
    replica.prepare()
    number = max(list_launch_numbers(replica.paths), default=0) + 1

    def is_over() -> bool:
        try:
            rings = rings_of(replica.paths.launch_dir(number))
        except ChronicleError:
            return False  # it is being made
        return all(rank in rings and max(rings[rank].steps(), default=0) >= until for rank in plan.rings)

    closed = json.dumps({"network": plan.network, "writable": replica.writable(), "parent": os.getpid()})
    played = play(
        replica,
        [replica.told(word) for word in plan.origin.command],
        replica.environment(),
        Until(step=NO_STEP, is_over=is_over),
        before=(sys.executable, "-m", "chronicle.replay.closed", closed),
        options=OPTIONS,
    )
    return _read_result(replica, number, plan.step, played.end, played.guard)


def _read_result(replica: Replica, number: int, step: int, end: str, guard: Sequence[GuardVerdict]) -> Played:
    """What a play left. `step`: the one that was asked for."""
    paths = replica.paths
    rings = rings_of(paths.launch_dir(number))
    begins = {rank: [one for one in ring.begins() if one.step < step] for rank, ring in rings.items()}
    if rings and not all(begins.values()):
        first = min(one.step for ring in rings.values() for one in ring.begins())
        raise ChronicleError(
            f"the replay began with step {first + 1}, after the one that was asked for: the script took a checkpoint by itself",
            "say where its checkpoints lie: --checkpoints DIR",
        )
    if not rings:
        raise ChronicleError(
            f"the replay took no step that could be compared ({end}): {_last_lines(paths, number)}",
            "a replay is cut off from the network: where the script reads from it, --network lets it",
        )
    starts = {rank: rows[-1] for rank, rows in begins.items()}
    return Played(
        prints={rank: ring.steps() for rank, ring in rings.items()},
        begins=starts,
        start=max(one.step for one in starts.values()),
        facts=_facts_of(replica, number),
        guard=guard,
    )


def _last_lines(paths: RunPaths, number: int) -> str:
    log = paths.supervisor_log(number)
    lines = log.read_text(errors="replace").strip().splitlines()[-6:] if log.exists() else []
    return " / ".join(lines)[-600:]


def _facts_of(replica: Replica, number: int) -> dict[str, Any] | None:
    """What the play was made by, with the names that its files have outside of the scratch directory."""
    facts = read_facts(replica.paths.launch_dir(number))
    if facts is None:
        return None
    told = {table: {replica.untold(path): digest for path, digest in facts[table].items()} for table in ("code", "files")}
    rewritten = replica.rewritten()
    environment = {name: digest for name, digest in facts["environment"].items() if name not in rewritten}
    return {**facts, **told, "environment": environment}
