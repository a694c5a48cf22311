"""`chronicle run --autopilot`: launch, and where a proposal stopped the launch, roll back and launch again, within budgets.

Off by default. It types the very command that it would have proposed, never raises an LR, takes its own rollback back
when the guard refuses the launch that follows, and stops for good where a budget is empty or the ladder ends: then a
person's note is required before it flies again. Deciding is pure (`decide`); launching and typing are handed in.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from chronicle.errors import Refusal
from chronicle.journal.entries import Entry
from chronicle.journal.reader import read_journal
from chronicle.journal.writer import JournalWriter
from chronicle.paths import RunPaths

ENTRY_KIND = "autopilot"
WAY_OUT = 'look, then: chronicle note "what you found and why it may fly again"'
REFUSED_BY_GUARD = 78
STOPPED_BY_PROPOSAL = "proposal"


class Step(StrEnum):
    """What the autopilot does after a launch has ended."""

    LAND = "land"  # the launch ended by itself: nothing to do
    ROLL_BACK = "roll-back"
    UNDO = "undo"  # the guard refused what the rollback made
    HALT = "halt"  # a person has to look


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The next step, why, and the command to type for it."""

    step: Step
    reason: str
    command: tuple[str, ...] = ()


class Ended(Protocol):
    """What the autopilot needs to know of a launch that ended (`chronicle.launch.launching.LaunchResult`)."""

    @property
    def launch(self) -> int: ...
    @property
    def exit_code(self) -> int: ...
    @property
    def data(self) -> Mapping[str, Any]: ...


def decide(end: Ended, proposal: Mapping[str, Any] | None, *, rolled_back: bool) -> Decision:
    """Decide from how the launch ended, the proposal that it left, and whether it followed an automatic rollback."""
    if end.exit_code == REFUSED_BY_GUARD and rolled_back:
        return Decision(step=Step.UNDO, reason="the guard refused the rolled-back state", command=("undo", "--yes"))
    if end.data.get("stopped_by") != STOPPED_BY_PROPOSAL:
        return Decision(step=Step.LAND, reason=f"the launch ended with exit code {end.exit_code}")
    if proposal is None:
        return Decision(step=Step.HALT, reason="the detector asked for a stop and left no proposal")
    if proposal.get("exhausted"):
        return Decision(step=Step.HALT, reason="; ".join(str(item) for item in proposal["exhausted"]))
    if not proposal.get("command"):
        return Decision(step=Step.HALT, reason=f"no rollback is left to try: {_last_reason(proposal)}")
    if float(proposal.get("lr_scale", 1.0)) > 1.0:
        return Decision(step=Step.HALT, reason="the proposal would raise the LR: only a person may do that")
    words = shlex.split(str(proposal["command"]))[1:]
    return Decision(step=Step.ROLL_BACK, reason=_last_reason(proposal), command=(*words, "--yes"))


def _last_reason(proposal: Mapping[str, Any]) -> str:
    reasons = proposal.get("reasons") or ["no reason given"]
    return str(reasons[-1])


def require_note_after_halt(entries: Sequence[Entry]) -> None:
    """Raise Refusal when the autopilot halted and no person has written a note since."""
    halted: Entry | None = None
    for entry in entries:
        if entry.kind == ENTRY_KIND and entry.data.get("step") == Step.HALT:
            halted = entry
        elif entry.kind == "note" and halted is not None:
            halted = None
    if halted is not None:
        raise Refusal(
            f"the autopilot halted ({halted.title}) and nobody has written a note since",
            WAY_OUT,
        )


def latest_proposal(entries: Sequence[Entry], launch: int) -> Mapping[str, Any] | None:
    """The last proposal that this launch left in the journal."""
    for entry in reversed(entries):
        if entry.kind == "proposal" and entry.launch == launch:
            return entry.data
    return None


def fly(
    paths: RunPaths, launch: Callable[[], Ended], type_command: Callable[[Sequence[str]], int],
    say: Callable[[str], None],
) -> Ended:  # fmt: skip
    """Launch until a launch ends by itself or the autopilot halts; returns how the last launch ended.

    `launch` runs one launch that stops on a proposal; `type_command` runs `chronicle` with these words and returns its
    exit code. Raises Refusal when an earlier halt still waits for a person's note.
    """
    require_note_after_halt(read_journal(paths).entries)
    rolled_back = False
    while True:
        end = launch()
        decision = decide(end, latest_proposal(read_journal(paths).entries, end.launch), rolled_back=rolled_back)
        if decision.step is Step.LAND:
            return end
        say(f"autopilot: {decision.step.value}: {decision.reason}")
        _record(paths, end.launch, decision)
        if decision.step is Step.HALT:
            say(f"autopilot: it does not fly again before a person has spoken: {WAY_OUT}")
            return end
        code = type_command(decision.command)
        if code != 0:
            failed = Decision(step=Step.HALT, reason=f"`chronicle {shlex.join(decision.command)}` ended with code {code}")
            say(f"autopilot: {failed.reason}; {WAY_OUT}")
            _record(paths, end.launch, failed)
            return end
        if decision.step is Step.UNDO:
            halted = Decision(step=Step.HALT, reason="its own rollback was refused and taken back")
            say(f"autopilot: {halted.reason}; {WAY_OUT}")
            _record(paths, end.launch, halted)
            return end
        rolled_back = True


def _record(paths: RunPaths, launch: int, decision: Decision) -> None:
    data = {"step": decision.step.value, "reason": decision.reason, "command": list(decision.command)}
    with JournalWriter(paths) as writer:
        writer.append(ENTRY_KIND, launch=launch, title=f"{decision.step.value}: {decision.reason}", data=data)
