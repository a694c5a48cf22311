"""The four launches of a rehearsal, one after the other, and what they tell.

    A    to step 2k, undisturbed
    A′   the same again: what differs between the two is not deterministic by nature
    B    to step k, ended by a signal; then resumed as the user resumes, to step 2k

Everything is written into scratch directories. Where a launch does not come to its step, the rehearsal ends with that sentence.
`--only term` plays B up to its end alone; `--only data` plays two steps after k, and compares what is read in them.
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
from chronicle.prints.compared import PARTS
from chronicle.rehearse.judge import (
    Compared,
    Finding,
    Prints,
    Rank,
    Series,
    Verdict,
    compare_files,
    compare_logs,
    judge,
    judge_prints,
)
from chronicle.rehearse.kept import PLAYED, ensure_room, mark_played
from chronicle.rehearse.launches import Place, Played, Running, checkpoints_below, read_played, saved_in
from chronicle.rehearse.leaves import Value, largest_difference, largest_number, read_leaves
from chronicle.rehearse.script import likely_line, refuse_outside
from chronicle.resume.rehearsal import Asked
from rollback.checkpoint.layout import Checkpoint

DATA_STEPS = 2  # after k, with `--only data`
BATCH = PARTS["batch"][1]
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
    only: str = ""  # "", "term" or "data"

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
    ranks: int | None = None  # of A; None: not known


def play_rehearsal(asked: Rehearsal, scratch: Path, say: Say) -> Answer:
    """Play the launches in `scratch` and compare. Raises `ChronicleError` where a launch could not be played."""
    began = time.monotonic()
    is_copy = not _names_out(asked.command)
    first_place, again_place, broken_place = (
        Place(name=name, scratch=scratch, is_copy=is_copy) for name in ("a", "again", "b")
    )
    if is_copy:
        refuse_outside(asked.command, Path.cwd())
        say("no {out} in the command: each launch runs in a copy of this directory; what it writes elsewhere is not kept apart")
    if asked.only == "term":
        return _answer_of_signal(asked, broken_place, _ended(asked, broken_place, say), began)
    first, again = _pair(asked, first_place, again_place, say)
    ended = _ended(asked, broken_place, say)
    signalled = _signalled(asked, broken_place, ended)
    target, found = _target(asked, broken_place)
    if target is None:
        return _without_resume(asked, signalled or found, ended, began, _start_of(first_place))
    assert target.step is not None
    saved = read_leaves(target.path, target.step, broken_place.stands_for())
    say(f"resumed from the checkpoint of step {target.step}")
    resumed = _resumed(asked, broken_place, target)
    steps = (target.step, asked.to)
    compared, at = _compare(asked, (first_place, again_place, broken_place), (first, again, resumed), saved, steps)
    if signalled is not None:
        compared = replace(compared, findings=(signalled, *compared.findings))
    notes = [_how_it_ended(asked, broken_place, ended), found.text, *_verdicts_of(broken_place, resumed)]
    return Answer(
        asked=asked,
        verdict=judge(compared),
        compared=compared,
        notes=tuple(note for note in notes if note),
        resumed_at=target.step,
        compared_at=at,
        seconds=time.monotonic() - began,
        start=_start_of(first_place),
        ranks=first.ranks or None,
    )


def _pair(asked: Rehearsal, first: Place, again: Place, say: Say) -> tuple[Played, Played]:
    """A and A′: those of an earlier rehearsal of the same, or played now."""
    if (first.scratch / PLAYED).exists():
        say("A and A′ are those of an earlier rehearsal: command, code, packages, environment and settings are the same")
        return read_played(first), read_played(again)
    one = _undisturbed(asked, first, say)
    ensure_room(first.scratch)
    two = _undisturbed(asked, again, say)
    mark_played(first.scratch)
    return one, two


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """B up to its end, and the steps of the checkpoints that it had when the signal came."""

    played: Played
    before: frozenset[int]


def _ended(asked: Rehearsal, place: Place, say: Say) -> Ended:
    """B to step k, and the signal."""
    before: frozenset[int] = frozenset()
    is_kill = asked.signal is signal.SIGKILL
    steps = Asked(save=asked.at, hold=asked.at, end=asked.to) if is_kill else Asked(end=asked.to)
    with Running(place, place.fill(asked.command), steps, {}) as running:
        for step in running.looks():
            if not is_kill and step >= asked.at:
                before = frozenset(saved_in(place.out))
                running.tell(asked.signal)
                break
            is_saved = is_kill and running.is_still() and any(one >= asked.at for one in saved_in(place.out))
            if is_saved or (is_kill and step >= asked.to + asked.at):
                running.kill_ranks()
                break
        played = running.wait(MOST_SECONDS)
    say(f"B: {asked.signal.name} after step {played.last_step or 0}")
    return Ended(played=played, before=before)


def _target(asked: Rehearsal, place: Place) -> tuple[Checkpoint | None, Finding]:
    """The checkpoint that B resumes from. What a fast script saved after it is moved away, as a rollback would.

    A finding without a text says that nothing is to be told.
    """
    saves = saved_in(place.out)
    unknown = [one.path.name for one in checkpoints_below(place.out) if one.step is None]
    if unknown and not saves:
        text = f"the step of `{unknown[0]}` is not known: it has no counter, and none in its name"
        return None, Finding(rank=Rank.START, what="checkpoints", text=text)
    if not saves:
        text = "nothing was saved"
        return None, Finding(rank=Rank.START, what=asked.signal.name, text=text, advice=SAVE_MORE)
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


SAVE_MORE = "save more often, or name steps at which it saves: --at, --to"
SAVES_AT_SIGNAL = {
    "transformers": "TrainingArguments(enable_jit_checkpoint=True)",
    "lightning": "plugins=SLURMEnvironment(requeue_signal=signal.SIGTERM), or a callback that saves in on_exception",
    "accelerate": "signal.signal(signal.SIGTERM, …) that sets a flag, and accelerator.save_state() at the next step",
}
OWN_HANDLER = "signal.signal(signal.SIGTERM, …) that sets a flag, and a save at the next step; HF: enable_jit_checkpoint=True"


def _signalled(asked: Rehearsal, place: Place, ended: Ended) -> Finding | None:
    """A signal that is to be answered by a save, and was not; None else."""
    saves = saved_in(place.out)
    if asked.signal is signal.SIGKILL or saves.keys() - ended.before:
        return None
    last = ended.played.last_step or 0
    text = f"nothing saved, {last - max(saves, default=0)} steps lost"
    if last >= asked.to:
        text = f"it went on to step {last}: the signal was not heard"
    written = {one.format for one in saves.values()}
    advice = next((words for name, words in SAVES_AT_SIGNAL.items() if name in written), OWN_HANDLER)
    return Finding(rank=Rank.SIGNAL, what=_name(asked), text=text, advice=advice)


def _name(asked: Rehearsal) -> str:
    return asked.signal.name.removeprefix("SIG")


def _how_it_ended(asked: Rehearsal, place: Place, ended: Ended) -> str:
    played = ended.played
    new = saved_in(place.out).keys() - ended.before
    if asked.signal is not signal.SIGKILL and new:
        return f"{_name(asked)}: saved at step {max(new)} within {played.ended_in or 0:.1f} s"
    took = "" if played.ended_in is None else f", {played.ended_in:.1f} s after the signal"
    return f"{asked.signal.name} after step {played.last_step or 0}: it ended with code {played.exit_code}{took}"


def _answer_of_signal(asked: Rehearsal, place: Place, ended: Ended, began: float) -> Answer:
    """What `--only term` tells."""
    found = _signalled(asked, place, ended)
    compared = Compared(findings=() if found is None else (found,), not_compared=("the resume: --only term",))
    return Answer(
        asked=asked, verdict=Verdict.SAVES if found is None else judge(compared), compared=compared,
        notes=(_how_it_ended(asked, place, ended),), resumed_at=None, compared_at=None,
        seconds=time.monotonic() - began, start=_start_of(place),
    )  # fmt: skip


def _without_resume(asked: Rehearsal, why: Finding, ended: Ended, began: float, start: LaunchStart | None) -> Answer:
    compared = Compared(findings=(), not_compared=(f"{why.what}: {why.text}",))
    if why.what in (asked.signal.name, _name(asked)):
        compared = Compared(findings=(why,), not_compared=())
    notes = [f"B came to step {ended.played.last_step or 0}: {ended.played.end}", "" if compared.findings else why.advice]
    return Answer(
        asked=asked, verdict=judge(compared), compared=compared, notes=tuple(note for note in notes if note),
        resumed_at=None, compared_at=None, seconds=time.monotonic() - began, start=start,
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
    elif begun < steps[0]:
        text = f"took step {begun} first: it did not go on from step {steps[0]}"
        advice = "say how it resumes: --resume-args '…', or --resume-with '…'"
        findings.append(Finding(rank=Rank.START, what="the resume", text=text, advice=advice))
    elif _reached(places[2], resumed) < asked.to:
        text = f"ended at step {_reached(places[2], resumed)} of {asked.to}: {resumed.end}"
        findings.append(Finding(rank=Rank.START, what="the resume", text=text))
    is_resharded = first.ranks != resumed.ranks
    logs = compare_logs(_series(first), _series(again), _series(resumed), steps, is_resharded=is_resharded)
    findings += logs.findings
    if logs.measured:
        not_compared.append(f"measured anew in each launch: {', '.join(logs.measured)}")
    if logs.num_values == 0:
        not_compared.append("logged values: none of the same step and name in both launches")
    counted_from = min((step for ring in resumed.prints.values() for step in ring), default=0)
    why = ""
    if not first.prints or not resumed.prints:
        why = "no guard was attached (docs/guard.md)"
    elif is_resharded:
        why = f"{first.ranks} and {resumed.ranks} ranks read other batches"
    elif counted_from <= steps[0]:
        why = f"the guard counted its steps from {counted_from}, as the optimizer does"
    prints = Prints() if why else judge_prints(first.prints, again.prints, resumed.prints, steps)
    findings += prints.findings
    if why:
        not_compared.append(f"batches, generators, gradients and weights of each step: {why}")
    not_compared += [f"{name} stand elsewhere after the resume, with no effect in these steps" for name in prints.idle]
    if asked.only == "data":
        return _only_data(findings, not_compared, prints, why), None
    must_differ: list[str] = []
    by_nature, unsure, num_leaves = [*logs.by_nature, *prints.by_nature], list(logs.unsure), 0
    at = _common_step(places, steps)
    if at is None:
        not_compared.append(f"files: no checkpoint after step {steps[0]} that all launches saved")
    else:
        leaves = [read_leaves(saved_in(place.out)[at].path, at, place.stands_for()) for place in places]
        files = compare_files(
            leaves[0], leaves[1], leaves[2], saved,
            gap=largest_difference, size=largest_number, is_shared=not logs.unsure,
            asked=asked.options_of_resume, steps=(steps[0], at), ranks=(first.ranks, resumed.ranks),
        )  # fmt: skip
        findings += files.findings
        by_nature += files.by_nature
        not_compared += files.not_compared
        unsure += files.unsure
        num_leaves = files.num_leaves
        must_differ = files.must_differ
    ordered = sorted(findings, key=lambda one: (one.rank, one.what))
    compared = Compared(
        findings=tuple(_with_line(one, asked.command) for one in ordered),
        not_compared=tuple(not_compared),
        num_leaves=num_leaves,
        num_values=logs.num_values,
        by_nature=tuple(by_nature),
        unsure=tuple(unsure),
        must_differ=tuple(must_differ),
    )
    return compared, at


def _only_data(findings: Sequence[Finding], not_compared: Sequence[str], prints: Prints, why: str) -> Compared:
    """What `--only data` tells: the batches, and what decides them."""
    told = tuple(one for one in findings if one.rank in (Rank.START, Rank.DATA, Rank.PRINT))
    return Compared(
        findings=told, not_compared=tuple(not_compared), by_nature=prints.by_nature,
        num_prints=0 if why or BATCH in prints.by_nature else DATA_STEPS,
    )  # fmt: skip


def _with_line(one: Finding, command: Sequence[str]) -> Finding:
    """With the line of the script that is likely to be changed, where state was not loaded."""
    if one.rank not in (Rank.DATA, Rank.ANEW, Rank.PRINT, Rank.STATE):
        return one
    keys = [part for part in one.what.rpartition(": ")[2].split(".") if part.isidentifier()]
    line = likely_line(command, Path.cwd(), keys[0] if keys and one.rank is not Rank.DATA else "")
    advice = "; ".join(words for words in (one.advice, line) if words)
    return replace(one, advice=advice)


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
