"""The four launches of a rehearsal, one after the other, and what they tell.

    A    to step 2k, undisturbed
    A′   the same again: what differs between the two is not deterministic by nature
    B    to step k, ended by a signal; then resumed as the user resumes, to step 2k

Everything is written into scratch directories. Where a launch does not come to its step, the rehearsal ends with that sentence.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from chronicle.errors import ChronicleError, UsageProblem
from chronicle.journal import read_journal
from chronicle.journal.events import GuardVerdict, LaunchStart, events_of
from chronicle.launch.restarts import RESUME_FROM, RESUME_STEP
from chronicle.rehearse.judge import (
    Compared,
    Finding,
    Rank,
    Series,
    Verdict,
    compare_files,
    compare_logs,
    compare_prints,
    judge,
)
from chronicle.rehearse.launches import Place, Played, Running, checkpoints_below, saved_in
from chronicle.rehearse.leaves import Value, largest_difference, largest_number, read_leaves
from chronicle.resume.rehearsal import Asked
from rollback.checkpoint.layout import Checkpoint

MOST_SECONDS = 120.0  # for a launch to end by itself, or after the signal that is rehearsed
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What is asked for."""

    command: tuple[str, ...]
    at: int
    to: int
    signal: signal.Signals
    resume_args: tuple[str, ...] = ()
    resume_with: tuple[str, ...] = ()  # the whole command of the resume, instead of the same with `resume_args`

    def __post_init__(self) -> None:
        if not 0 < self.at < self.to:
            raise UsageProblem(f"--at {self.at} --to {self.to}: expected 0 < at < to")
        if self.resume_with and _names_out(self.resume_with) is not _names_out(self.command):
            remedy = "put it into both, or into none: then each runs in a copy of this directory"
            raise UsageProblem("{out} is in one of the two commands only", remedy)

    @property
    def resume(self) -> tuple[str, ...]:
        """The command of the resume."""
        return self.resume_with or (*self.command, *self.resume_args)

    @property
    def options_of_resume(self) -> tuple[str, ...]:
        """The names of options that only the resume has, as they may stand in a file of settings."""
        return tuple(
            word.lstrip("-").partition("=")[0].replace("-", "_") for word in self.resume if word not in self.command
            and word.startswith("--")
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a rehearsal found."""

    asked: Rehearsal
    verdict: Verdict
    compared: Compared
    notes: tuple[str, ...]
    resumed_at: int | None  # step of the checkpoint that B resumed from
    compared_at: int | None  # step of the checkpoints that were compared
    seconds: float
    start: LaunchStart | None  # of A: its code and packages


def play_rehearsal(asked: Rehearsal, scratch: Path, say: Say) -> Answer:
    """Play the four launches in `scratch` and compare. Raises `ChronicleError` where a launch could not be played."""
    began = time.monotonic()
    say(f"rehearsal: 4 launches, about {3 * asked.to} steps; everything is written into `{scratch}`")
    is_copy = not _names_out(asked.command)
    first_place, again_place, broken_place = (
        Place(name=name, scratch=scratch, is_copy=is_copy) for name in ("a", "again", "b")
    )
    if is_copy:
        say("no {out} in the command: each launch runs in a copy of this directory; what it writes elsewhere is not kept apart")
    first = _undisturbed(asked, first_place, say)
    again = _undisturbed(asked, again_place, say)
    broken = _ended(asked, broken_place, say)
    notes = [_how_it_ended(asked, broken)]
    target, found = _target(asked, broken_place, broken)
    if target is None:
        return _without_resume(asked, found, notes, time.monotonic() - began, _start_of(first_place))
    if found.text:
        notes.append(found.text)
    assert target.step is not None
    saved = read_leaves(target.path, target.step, broken_place.stands_for())
    say(f"resumed from the checkpoint of step {target.step}")
    lost = (broken.last_step or 0) - target.step
    if asked.signal is not signal.SIGKILL and lost > 0:
        notes.append(f"{lost} steps before {asked.signal.name} are in no checkpoint: {_advice(asked.signal)}")
    resumed = _resumed(asked, broken_place, target)
    steps = (target.step, asked.to)
    compared, at = _compare(asked, (first_place, again_place, broken_place), (first, again, resumed), saved, steps)
    notes += _verdicts_of(broken_place, resumed)
    return Answer(
        asked=asked,
        verdict=judge(compared),
        compared=compared,
        notes=tuple(notes),
        resumed_at=target.step,
        compared_at=at,
        seconds=time.monotonic() - began,
        start=_start_of(first_place),
    )


# --- the launches


def _undisturbed(asked: Rehearsal, place: Place, say: Say) -> Played:
    steps = Asked(save=asked.at, hold=asked.to, end=asked.to)
    with Running(place, place.fill(asked.command), steps, {}) as running:
        played = _until_the_last_step(running, asked)
    say(f"{'A' if place.name == 'a' else 'A′'}: {played.last_step or 0} steps in {played.seconds:.0f} s")
    if _reached(place, played) < asked.to:
        raise ChronicleError(
            f"the undisturbed launch came to step {_reached(place, played)} of {asked.to}: {played.end}",
            "steps are known from a guard or from printed lines; --keep keeps its output, --at and --to name other steps",
        )
    return played


def _reached(place: Place, played: Played) -> int:
    """The last step that a launch is known to have taken: logged, printed, or of a checkpoint."""
    return max(played.last_step or 0, *saved_in(place.out), 0)


def _resumed(asked: Rehearsal, place: Place, target: Checkpoint) -> Played:
    handed = {RESUME_FROM: str(target.path), RESUME_STEP: str(target.step)}
    words = place.fill(asked.resume, target.path)
    with Running(place, words, Asked(hold=asked.to, end=asked.to), handed) as running:
        return _until_the_last_step(running, asked)


def _until_the_last_step(running: Running, asked: Rehearsal) -> Played:
    """Let a launch go on until the checkpoint of the last step is whole, or it is as far again as from k to 2k."""
    patience = asked.to - asked.at
    for step in running.looks():
        if step >= asked.to + patience:
            break
        if running.is_still() and any(one >= asked.to for one in saved_in(running.place.out)):
            break
    else:
        return running.wait(MOST_SECONDS)
    running.kill_ranks()  # what is compared is on disk; the supervisor writes its part
    return running.wait(MOST_SECONDS)


def _ended(asked: Rehearsal, place: Place, say: Say) -> Played:
    """B to step k, and the signal."""
    is_kill = asked.signal is signal.SIGKILL
    steps = Asked(save=asked.at, hold=asked.at, end=asked.to) if is_kill else Asked(end=asked.to)
    with Running(place, place.fill(asked.command), steps, {}) as running:
        for step in running.looks():
            if not is_kill and step >= asked.at:
                running.tell(asked.signal)
                break
            is_saved = is_kill and running.is_still() and any(one >= asked.at for one in saved_in(place.out))
            if is_saved or (is_kill and step >= asked.to + asked.at):
                running.kill_ranks()
                break
        played = running.wait(MOST_SECONDS)
    say(f"B: {asked.signal.name} after step {played.last_step or 0}")
    return played


def _target(asked: Rehearsal, place: Place, broken: Played) -> tuple[Checkpoint | None, Finding]:
    """The checkpoint that B resumes from. What a fast script saved after it is moved away, as a rollback would.

    A finding without a text says that nothing is to be told.
    """
    saves = saved_in(place.out)
    unknown = [one.path.name for one in checkpoints_below(place.out) if one.step is None]
    if unknown and not saves:
        text = f"the step of `{unknown[0]}` is not known: it has no counter, and none in its name"
        return None, Finding(rank=Rank.START, what="checkpoints", text=text)
    if not saves:
        text = f"nothing was saved: {broken.last_step or 0} steps are lost"
        return None, Finding(rank=Rank.START, what=asked.signal.name, text=text, advice=_advice(asked.signal))
    nothing = Finding(rank=Rank.START, what="", text="")
    if asked.signal is not signal.SIGKILL:
        return saves[max(saves)], nothing
    usable = [step for step in saves if asked.at <= step < asked.to]
    if not usable:
        listed = ", ".join(map(str, sorted(saves)))
        text = f"no checkpoint between step {asked.at} and {asked.to}: there are {listed}"
        return None, Finding(rank=Rank.START, what="checkpoints", text=text, advice="name steps at which it saves: --at, --to")
    later = [one for step, one in saves.items() if step > min(usable)]
    for one in later:
        aside = place.scratch / place.name / "later"
        aside.mkdir(exist_ok=True)
        one.path.rename(aside / one.path.name)
    if later:
        text = f"the script was faster than the signal: {len(later)} later checkpoints were moved away before the resume"
        return saves[min(usable)], replace(nothing, text=text)
    return saves[min(usable)], nothing


def _advice(number: signal.Signals) -> str:
    if number is signal.SIGKILL:
        return "save more often, or name steps at which it saves: --at, --to"
    return "save when the signal comes: HF `enable_jit_checkpoint=True`, Lightning's SLURM plugin, or a handler of your own"


def _how_it_ended(asked: Rehearsal, broken: Played) -> str:
    took = "" if broken.ended_in is None else f", {broken.ended_in:.1f} s after the signal"
    return f"{asked.signal.name} after step {broken.last_step or 0}: it ended with code {broken.exit_code}{took}"


def _without_resume(
    asked: Rehearsal, why: Finding, notes: Sequence[str], seconds: float, start: LaunchStart | None
) -> Answer:
    compared = Compared(findings=(), not_compared=(f"{why.what}: {why.text}",), num_leaves=0, num_values=0, by_nature=())
    if why.rank is Rank.START and why.what == asked.signal.name:
        compared = replace(compared, findings=(why,), not_compared=())
    return Answer(
        asked=asked, verdict=judge(compared), compared=compared, notes=(*notes, *([why.advice] if why.advice else [])),
        resumed_at=None, compared_at=None, seconds=seconds, start=start,
    )  # fmt: skip


# --- comparing


def _compare(
    asked: Rehearsal,
    places: tuple[Place, Place, Place],
    played: tuple[Played, Played, Played],
    saved: Mapping[str, Value],
    steps: tuple[int, int],
) -> tuple[Compared, int | None]:
    first, again, resumed = played
    findings: list[Finding] = []
    not_compared: list[str] = []
    begun = resumed.first_step
    if begun is None:
        findings.append(Finding(rank=Rank.START, what="the resume", text=f"took no step: {resumed.end}"))
    elif begun <= steps[0]:
        text = f"took step {begun} first: it did not go on from step {steps[0]}"
        advice = "say how it resumes: --resume-args '…', or --resume-with '…'"
        findings.append(Finding(rank=Rank.START, what="the resume", text=text, advice=advice))
    elif _reached(places[2], resumed) < asked.to:
        text = f"ended at step {_reached(places[2], resumed)} of {asked.to}: {resumed.end}"
        findings.append(Finding(rank=Rank.START, what="the resume", text=text))
    logs = compare_logs(_series(first), _series(again), _series(resumed), steps)
    findings += logs.findings
    if logs.measured:
        not_compared.append(f"measured anew in each launch: {', '.join(logs.measured)}")
    if logs.num_values == 0:
        not_compared.append("logged values: none of the same step and name in both launches")
    counted_from = min((step for ring in resumed.prints.values() for step in ring), default=0)
    if first.prints and 0 < counted_from <= steps[0]:
        why = f"the guard counted its steps from {counted_from}, as the optimizer does"
        not_compared.append(f"batches, generators, gradients and weights of each step: {why}")
    elif first.prints and resumed.prints:
        findings += compare_prints(first.prints, again.prints, resumed.prints, steps)
    else:
        not_compared.append("batches, generators, gradients and weights of each step: no guard was attached (docs/guard.md)")
    by_nature, unsure, num_leaves = list(logs.by_nature), list(logs.unsure), 0
    at = _common_step(places, steps)
    if at is None:
        not_compared.append(f"files: no checkpoint after step {steps[0]} that all launches saved")
    else:
        leaves = [read_leaves(saved_in(place.out)[at].path, at, place.stands_for()) for place in places]
        files = compare_files(
            leaves[0], leaves[1], leaves[2], saved,
            gap=largest_difference, size=largest_number, is_shared=not logs.unsure,
            asked=asked.options_of_resume, steps=(steps[0], at),
        )  # fmt: skip
        findings += files.findings
        by_nature += files.by_nature
        not_compared += files.not_compared
        unsure += files.unsure
        num_leaves = files.num_leaves
    ordered = tuple(sorted(findings, key=lambda one: (one.rank, one.what)))
    compared = Compared(
        findings=ordered,
        not_compared=tuple(not_compared),
        num_leaves=num_leaves,
        num_values=logs.num_values,
        by_nature=tuple(by_nature),
        unsure=tuple(unsure),
    )
    return compared, at


def _series(played: Played) -> Series:
    values: dict[int, dict[str, float]] = {}
    for point in played.points:
        values.setdefault(point.step, {}).update(point.values)
    return values


def _common_step(places: Sequence[Place], steps: tuple[int, int]) -> int | None:
    """The last step up to 2k of which all three have a checkpoint."""
    shared = set.intersection(*(set(saved_in(place.out)) for place in places))
    return max((step for step in shared if steps[0] < step <= steps[1]), default=None)


def _verdicts_of(place: Place, resumed: Played) -> list[str]:
    """What the guard said of the resume."""
    entries = read_journal(place.paths).entries
    found = [verdict for entry, verdict in events_of(entries, GuardVerdict) if entry.launch == resumed.launch]
    return [f"the guard of the resume: {found[-1].verdict}"] if found else []


def _start_of(place: Place) -> LaunchStart | None:
    return next((start for _, start in events_of(read_journal(place.paths).entries, LaunchStart)), None)


def _names_out(words: Sequence[str]) -> bool:
    return any("{out}" in word for word in words)
