"""One play of recorded steps: a fork of the command that is stopped after the last one, what it left, and how it compares.

Two plays of the same steps tell whether anything is repeatable.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.launch.code import CodeChange
from chronicle.prints.compared import PrintComparison, Prints, compare_prints, prints_agree, step_that_tells
from chronicle.replay.fork import Forked, Origin, play
from chronicle.resume.batch_record import read_batches
from chronicle.resume.launch_facts import read_facts
from chronicle.resume.ring import Print, Ring, rings_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """What a replay will do."""

    origin: Origin
    step: int
    until: int
    rings: Mapping[int, Ring]
    code: CodeChange | None = None
    network: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One replay that was played."""

    prints: Prints
    begins: Mapping[int, Print]  # by rank: the weights that it began with
    start: int
    facts: Mapping[str, Any] | None
    end: Mapping[str, Any]
    batches: Mapping[int, list[int]]

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


def play_once(plan: ReplayPlan, sandbox: Path | None) -> Played:
    """Play the steps of a plan."""
    # the next step that tells it, too: whether its generators stand elsewhere tells of the step before
    until = step_that_tells({rank: ring.steps() for rank, ring in plan.rings.items()}, plan.until) or plan.until
    with play(plan.origin, until, sandbox=sandbox, ranks=sorted(plan.rings), code=plan.code, network=plan.network) as forked:
        return _read_result(forked, plan.step)


def _read_result(forked: Forked, step: int) -> Played:
    """What a fork left. `step`: the one that was asked for."""
    result, end = forked.directory, forked.end
    rings = rings_of(result / "launch")
    begins = {rank: [one for one in ring.begins() if one.step < step] for rank, ring in rings.items()}
    if rings and not all(begins.values()):
        first = min(one.step for ring in rings.values() for one in ring.begins())
        raise ChronicleError(
            f"the replay began with step {first + 1}, after the one that was asked for: the script took a checkpoint by itself",
            "say where its checkpoints lie: --checkpoints DIR",
        )
    if not rings:
        log = result / "launch" / "supervisor.log"
        lines = log.read_text(errors="replace").strip().splitlines()[-6:] if log.exists() else []
        why = str(end["end"].get("because") or "it ended")
        raise ChronicleError(
            f"the replay took no step that could be compared ({why}): {' / '.join(lines)[-600:]}",
            "a replay is cut off from the network: where the script reads from it, --network lets it",
        )
    prints = {rank: ring.steps() for rank, ring in rings.items()}
    starts = {rank: rows[-1] for rank, rows in begins.items()}
    return Played(
        prints=prints,
        begins=starts,
        start=max(one.step for one in starts.values()),
        facts=read_facts(result / "launch"),
        end=end,
        batches=batches_of(result / "batches", end["launch"], 0),
    )


def batches_of(directory: Path, launch: int, rank: int) -> dict[int, list[int]]:
    """By step: the digests of the micro-batches that a launch took, as `batches.py` recorded them."""
    found: dict[int, list[int]] = {}
    for digest, step in read_batches(directory, launch, rank):
        found.setdefault(step, []).append(digest)
    return found
