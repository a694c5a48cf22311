"""The autopilot: types the proposed command, within budgets, never raises an LR, halts for a person."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from chronicle.errors import Refusal
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import Proposed
from chronicle.paths import RunPaths
from chronicle.watch.autopilot import Step, decide, run_autopilot

PROPOSAL = {
    "command": "chronicle rollback --to 250 --reshuffle --run tiny", "lr_scale": 1.0, "reasons": ["why"], "exhausted": [],
}  # fmt: skip


@dataclass(frozen=True)
class End:
    launch: int = 1
    exit_code: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)


STOPPED = {"stopped_by": "proposal"}


@pytest.mark.parametrize(
    ("end", "proposal", "rolled_back", "step"),
    [
        (End(), PROPOSAL, False, Step.LAND),
        (End(exit_code=1), None, True, Step.LAND),
        (End(data=STOPPED), PROPOSAL, False, Step.ROLL_BACK),
        (End(data=STOPPED), PROPOSAL, True, Step.ROLL_BACK),
        (End(data=STOPPED), None, False, Step.HALT),
        (End(data=STOPPED), PROPOSAL | {"exhausted": ["4 rollbacks in one day (budget 4)"]}, False, Step.HALT),
        (End(data=STOPPED), PROPOSAL | {"command": None}, False, Step.HALT),
        (End(data=STOPPED), PROPOSAL | {"lr_scale": 2.0}, False, Step.HALT),
        (End(data=STOPPED), PROPOSAL | {"by_hand": "multiply by 0.5 the LR of the script"}, False, Step.HALT),
        (End(exit_code=78), None, True, Step.UNDO),
        (End(exit_code=78), None, False, Step.LAND),
    ],
)
def test_decision(end: End, proposal: dict[str, Any] | None, rolled_back: bool, step: Step) -> None:
    told = None if proposal is None else Proposed.from_json(proposal)
    assert decide(end, told, rolled_back=rolled_back).step is step


class Flight:
    """Launches that end as told, each leaving a proposal where it says so."""

    def __init__(self, paths: RunPaths, ends: Sequence[tuple[End, dict[str, Any] | None]], code: int = 0) -> None:
        self.paths, self.ends, self.code = paths, list(ends), code
        self.typed: list[tuple[str, ...]] = []

    def launch(self) -> End:
        end, proposal = self.ends.pop(0)
        if proposal is not None:
            with JournalWriter(self.paths) as writer:
                writer.append("proposal", launch=end.launch, data=proposal)
        return end

    def type_command(self, words: Sequence[str]) -> int:
        self.typed.append(tuple(words))
        return self.code

    def fly(self) -> Any:
        return run_autopilot(self.paths, self.launch, self.type_command, lambda line: None)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "tiny")


def kinds(paths: RunPaths) -> list[str]:
    return [entry.data["step"] for entry in read_journal(paths).entries if entry.kind == "autopilot"]


def test_it_types_the_proposed_command_and_launches_again(paths: RunPaths) -> None:
    flight = Flight(paths, [(End(launch=1, data=STOPPED), PROPOSAL), (End(launch=2), None)])
    assert flight.fly().launch == 2
    assert flight.typed == [("rollback", "--to", "250", "--reshuffle", "--run", "tiny", "--yes")]
    assert kinds(paths) == ["roll-back"]


def test_its_own_rollback_is_undone_when_the_guard_refuses(paths: RunPaths) -> None:
    """A contract that fails after an automatic rollback is the autopilot's own fault: back as it was, and halt."""
    flight = Flight(paths, [(End(launch=1, data=STOPPED), PROPOSAL), (End(launch=2, exit_code=78), None)])
    assert flight.fly().exit_code == 78
    assert flight.typed[-1] == ("undo", "--yes")
    assert kinds(paths) == ["roll-back", "undo", "halt"]


def test_after_a_halt_a_persons_note_is_required(paths: RunPaths) -> None:
    spent = PROPOSAL | {"exhausted": ["3 rollbacks in the region of step 400 (budget 3)"]}
    Flight(paths, [(End(data=STOPPED), spent)]).fly()
    with pytest.raises(Refusal, match="nobody has written a note since"):
        Flight(paths, []).fly()
    with JournalWriter(paths) as writer:
        writer.append("note", title="looked: bad node, drained")
    assert Flight(paths, [(End(launch=5), None)]).fly().launch == 5


def test_failing_command_halts(paths: RunPaths) -> None:
    flight = Flight(paths, [(End(data=STOPPED), PROPOSAL)], code=3)
    flight.fly()
    assert kinds(paths) == ["roll-back", "halt"]
