"""`chronicle run --autopilot`: launch; when a proposal stops the launch, roll back and launch again, within budgets.

Off by default. It runs the proposed command, refuses a proposal that raises the LR, and undoes its own rollback when the
guard refuses the next launch. It halts when a budget is used up or no action is left; a person's note is then required
before it runs again. `decide` is a function of values; launching and running commands are passed in.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from chronicle.errors import Refusal
from chronicle.journal.entries import Entry
from chronicle.journal.events import Autopilot, EntryKind, LaunchEnd, Proposed
from chronicle.journal.reader import describe_damage, find_damage, read_journal
from chronicle.journal.writer import JournalWriter
from chronicle.paths import RunPaths

if TYPE_CHECKING:
    from chronicle.launch.launching import LaunchResult

WAY_OUT = 'find the cause, then: chronicle note "what you found and why the autopilot may continue"'
REFUSED_BY_GUARD = 78
STOPPED_BY_PROPOSAL = "proposal"


class Step(StrEnum):
    """What the autopilot does after a launch has ended."""

    LAND = "land"  # the launch ended by itself: nothing to do
    ROLL_BACK = "roll-back"
    UNDO = "undo"  # the guard refused the state that the rollback made
    HALT = "halt"  # a person has to decide


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The next step, the reason, and the command for it."""

    step: Step
    reason: str
    command: tuple[str, ...] = ()


def decide(end: LaunchResult, proposal: Proposed | None, *, rolled_back: bool) -> Decision:
    """Decide from how the launch ended, the proposal that it left, and whether it followed an automatic rollback."""
    if end.exit_code == REFUSED_BY_GUARD and rolled_back:
        return Decision(step=Step.UNDO, reason="the guard refused the rolled-back state", command=("undo", "--yes"))
    if LaunchEnd.view(end.data).stopped_by != STOPPED_BY_PROPOSAL:
        return Decision(step=Step.LAND, reason=f"the launch ended with exit code {end.exit_code}")
    if proposal is None:
        return Decision(step=Step.HALT, reason="the detector stopped the launch and left no proposal")
    reason = proposal.reasons[-1] if proposal.reasons else "no reason given"
    halts = (
        (proposal.exhausted, "; ".join(proposal.exhausted)),
        (proposal.by_hand, f"only a person can do a part of it: {proposal.by_hand}"),
        (not proposal.command, f"no further rollback is proposed: {reason}"),
        ((proposal.lr_scale or 0.0) > 1.0, "the proposal raises the LR: only a person may do that"),
    )
    for holds, why in halts:
        if holds:
            return Decision(step=Step.HALT, reason=why)
    return Decision(step=Step.ROLL_BACK, reason=reason, command=(*shlex.split(proposal.command or "")[1:], "--yes"))


def require_note_after_halt(entries: Sequence[Entry]) -> None:
    """Raise Refusal when the autopilot halted and no person has written a note since."""
    halted: Entry | None = None
    for entry in entries:
        if entry.kind == EntryKind.AUTOPILOT and Autopilot.of(entry).step == Step.HALT:
            halted = entry
        elif entry.kind == EntryKind.NOTE:
            halted = None
    if halted is not None:
        raise Refusal(f"the autopilot halted ({halted.title}) and nobody has written a note since", WAY_OUT)


def latest_proposal(entries: Sequence[Entry], launch: int) -> Proposed | None:
    """Return the last proposal that this launch left in the journal."""
    for entry in reversed(entries):
        if entry.kind == EntryKind.PROPOSAL and entry.launch == launch:
            return Proposed.of(entry)
    return None


def run_autopilot(
    paths: RunPaths, launch: Callable[[], LaunchResult], type_command: Callable[[Sequence[str]], int],
    say: Callable[[str], None],
) -> LaunchResult:  # fmt: skip
    """Launch until a launch ends by itself or the autopilot halts; returns how the last launch ended.

    `launch` runs one launch that stops on a proposal. `type_command` runs `chronicle` with these words and returns its
    exit code. Raises Refusal when the autopilot halted before and nobody has written a note since.
    """
    require_note_after_halt(read_journal(paths).entries)
    rolled_back = False
    while True:
        end = launch()
        journal = read_journal(paths)
        decision = decide(end, latest_proposal(journal.entries, end.launch), rolled_back=rolled_back)
        damage = find_damage(paths, journal)
        if damage and decision.step is not Step.LAND:
            decision = Decision(step=Step.HALT, reason=describe_damage(paths, damage))
        if decision.step is Step.LAND:
            return end
        say(f"autopilot: {decision.step.value}: {decision.reason}")
        _record(paths, end.launch, decision)
        if decision.step is Step.HALT:
            say(f"autopilot: halted; {WAY_OUT}")
            return end
        code = type_command(decision.command)
        if code == 0 and decision.step is Step.ROLL_BACK:
            rolled_back = True
            continue
        reason = "the guard refused the autopilot's rollback, which was undone"
        if code != 0:
            reason = f"`chronicle {shlex.join(decision.command)}` ended with code {code}"
        say(f"autopilot: {reason}; {WAY_OUT}")
        _record(paths, end.launch, Decision(step=Step.HALT, reason=reason))
        return end


def _record(paths: RunPaths, launch: int, decision: Decision) -> None:
    event = Autopilot(step=decision.step.value, reason=decision.reason, command=decision.command)
    with JournalWriter(paths) as writer:
        writer.write(event, launch=launch, title=f"{decision.step.value}: {decision.reason}")
