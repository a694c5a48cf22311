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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from chronicle.errors import ChronicleError, UsageProblem
from chronicle.journal import read_journal
from chronicle.journal.events import GuardVerdict, LaunchStart, events_of
from chronicle.launch.restarts import RESUME_FROM, RESUME_STEP
from chronicle.prints.compared import PARTS
from chronicle.rehearse.judge import Compared, Rank, Row, Sides, Verdict, compare_values, judge, judge_prints
from chronicle.rehearse.kept import PLAYED, ensure_room, mark_played
from chronicle.rehearse.launches import Place, Played, Running, checkpoints_below, read_played, saved_in
from chronicle.rehearse.leaves import Leaves, logged_leaves, read_leaves
from chronicle.rehearse.script import likely_line, refuse_outside
from chronicle.resume.rehearsal import Asked
from rollback.checkpoint.layout import Checkpoint

DATA_STEPS = 2  # after k, with `--only data`
BATCH = PARTS["batch"][1]
PRINTS = "batches, generators, gradients and weights of each step"
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
    compared: Compared
    seconds: float
    start: LaunchStart | None  # of the first launch: its code and packages
    resumed_at: int | None = None  # step of the checkpoint that B resumed from
    compared_at: int | None = None  # step of the checkpoints that were compared
    ranks: int | None = None  # of A; None: not known

    @property
    def verdict(self) -> Verdict:
        """The word for it."""
        return judge(self.compared, is_saved=self.asked.only == "term")


def play_rehearsal(asked: Rehearsal, scratch: Path, say: Say) -> Answer:
    """Play the launches in `scratch` and compare. Raises `ChronicleError` where a launch could not be played."""
    began = time.monotonic()
    is_copy = not _names_out(asked.command)
    first_place, again_place, broken = (Place(name=name, scratch=scratch, is_copy=is_copy) for name in ("a", "again", "b"))
    if is_copy:
        refuse_outside(asked.command, Path.cwd())
        say("no {out} in the command: each launch runs in a copy of this directory; what it writes elsewhere is not kept apart")
    if asked.only != "term":
        first, again = _pair(asked, first_place, again_place, say)
    ended = _ended(asked, broken, say)
    rows = [_signalled(asked, broken, ended)]
    target = None
    if asked.only == "term":
        rows.append(Row(rank=Rank.NOT_COMPARED, what="the resume", text="--only term"))
    else:
        target, why = _target(asked, broken)
        rows += why
    if target is None or target.step is None:
        rows.append(Row(rank=Rank.NOTE, what=f"B came to step {ended.last_step or 0}", text=ended.end))
        compared = Compared(rows=tuple(rows))
        return Answer(asked=asked, compared=compared, seconds=time.monotonic() - began, start=_start_of(broken))
    saved = read_leaves(target.path, target.step, broken.stands_for())
    say(f"resumed from the checkpoint of step {target.step}")
    resumed = _resumed(asked, broken, target)
    steps = (target.step, asked.to)
    compared, at = _compare(asked, (first_place, again_place, broken), (first, again, resumed), saved, steps)
    told = (_with_line(row, asked.command) for row in (*rows, *_verdicts_of(broken, resumed), *compared.rows))
    return Answer(
        asked=asked,
        compared=replace(compared, rows=tuple(told)),
        resumed_at=target.step,
        compared_at=at,
        seconds=time.monotonic() - began,
        start=_start_of(first_place),
        ranks=first.ranks,
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


def _target(asked: Rehearsal, place: Place) -> tuple[Checkpoint | None, list[Row]]:
    """The checkpoint that B resumes from. What a fast script saved after it is moved away, as a rollback would."""
    saves = saved_in(place.out)
    if not saves:
        unknown = [one.path.name for one in checkpoints_below(place.out)]
        text = f"the step of `{unknown[0]}` is not known: it has no counter, and none in its name" if unknown else ""
        if text:
            return None, [Row(rank=Rank.NOT_COMPARED, what="checkpoints", text=text)]
        is_told = asked.signal is not signal.SIGKILL
        rank = Rank.NOTE if is_told else Rank.START
        return None, [Row(rank=rank, what=asked.signal.name, text="nothing was saved", advice=SAVE_MORE)]
    if asked.signal is not signal.SIGKILL:
        return saves[max(saves)], []
    usable = [step for step in saves if asked.at <= step < asked.to]
    if not usable:
        listed = ", ".join(map(str, sorted(saves)))
        text = f"none between step {asked.at} and {asked.to}: there are {listed}; {SAVE_MORE}"
        return None, [Row(rank=Rank.NOT_COMPARED, what="checkpoints", text=text)]
    later = [one for step, one in saves.items() if step > min(usable)]
    for one in later:
        aside = place.scratch / place.name / "later"
        aside.mkdir(exist_ok=True)
        one.path.rename(aside / one.path.name)
    text = f"the script was faster than the signal: {len(later)} later checkpoints were moved away before the resume"
    return saves[min(usable)], [Row(rank=Rank.NOT_COMPARED, what=text)] if later else []


SAVE_MORE = "save more often, or name steps at which it saves: --at, --to"
SAVES_AT_SIGNAL = {
    "transformers": "TrainingArguments(enable_jit_checkpoint=True)",
    "lightning": "plugins=SLURMEnvironment(requeue_signal=signal.SIGTERM), or a callback that saves in on_exception",
    "accelerate": "signal.signal(signal.SIGTERM, …) that sets a flag, and accelerator.save_state() at the next step",
}
OWN_HANDLER = "signal.signal(signal.SIGTERM, …) that sets a flag, and a save at the next step; HF: enable_jit_checkpoint=True"


def _signalled(asked: Rehearsal, place: Place, ended: Played) -> Row:
    """How B ended: a difference where a signal is to be answered by a save, and was not."""
    saves, last, name = saved_in(place.out), ended.last_step or 0, asked.signal.name.removeprefix("SIG")
    took = f"{ended.ended_in or 0:.1f} s"
    if asked.signal is signal.SIGKILL:
        return Row(rank=Rank.NOTE, what=f"SIGKILL after step {last}", text=f"it ended with code {ended.exit_code} in {took}")
    new = saves.keys() - ended.saved_before
    if new:
        return Row(rank=Rank.NOTE, what=name, text=f"saved at step {max(new)} within {took}")
    text = f"nothing saved, {last - max(saves, default=0)} steps lost; it ended with code {ended.exit_code} in {took}"
    if last >= asked.to:
        text = f"it went on to step {last}: the signal was not heard"
    written = {one.format for one in saves.values()}
    advice = next((words for name, words in SAVES_AT_SIGNAL.items() if name in written), OWN_HANDLER)
    return Row(rank=Rank.SIGNAL, what=name, text=text, advice=advice)


# --- comparing


def _compare(
    asked: Rehearsal,
    places: tuple[Place, Place, Place],
    played: tuple[Played, Played, Played],
    saved: Leaves,
    steps: tuple[int, int],
) -> tuple[Compared, int | None]:
    first, again, resumed = played
    rows = [*_begun(resumed, steps[0]), *_of_prints(first, again, resumed, steps)]
    if not rows and _reached(places[2], resumed) < asked.to:
        text = f"ended at step {_reached(places[2], resumed)} of {asked.to}: {resumed.end}"
        rows.append(Row(rank=Rank.START, what="the resume", text=text))
    if asked.only == "data":
        is_told = not any(row.rank >= Rank.NOT_COMPARED and row.what in (PRINTS, BATCH) for row in rows)
        return Compared(rows=tuple(rows), num_prints=DATA_STEPS * is_told), None
    leaves = [logged_leaves(one.points, steps[0] - 1, asked.to) for one in (first, again)]
    leaves.append(logged_leaves(resumed.points, *steps))
    at = _common_step(places, steps)
    if at is None:
        text = f"no checkpoint after step {steps[0]} that all launches saved"
        rows.append(Row(rank=Rank.NOT_COMPARED, what="files", text=text))
    else:
        for found, place in zip(leaves, places, strict=True):
            found |= read_leaves(saved_in(place.out)[at].path, at, place.stands_for())
    ranks = (first.ranks, resumed.ranks)
    sides = Sides(first=leaves[0], again=leaves[1], resumed=leaves[2], saved=saved, step=steps[0])
    compared = compare_values(sides, asked.options_of_resume, ranks)
    if compared.num_values == 0:
        rows.append(Row(rank=Rank.NOT_COMPARED, what="logged values", text="none of the same step and name in both launches"))
    return replace(compared, rows=(*rows, *compared.rows)), at


def _begun(resumed: Played, step: int) -> Iterator[Row]:
    """What is wrong with where the resume began."""
    begun = resumed.first_step
    if begun is None:
        yield Row(rank=Rank.START, what="the resume", text=f"took no step: {resumed.end}")
    elif begun < step:
        advice = "say how it resumes: --resume-args '…', or --resume-with '…'"
        text = f"took step {begun} first: it did not go on from step {step}"
        yield Row(rank=Rank.START, what="the resume", text=text, advice=advice)


def _of_prints(first: Played, again: Played, resumed: Played, steps: tuple[int, int]) -> Iterator[Row]:
    counted_from = min((step for ring in resumed.prints.values() for step in ring), default=0)
    why = ""
    if not first.prints or not resumed.prints:
        why = "no guard was attached (docs/guard.md)"
    elif first.ranks != resumed.ranks:
        why = f"{first.ranks} and {resumed.ranks} ranks read other batches"
    elif counted_from <= steps[0]:
        why = f"the guard counted its steps from {counted_from}, as the optimizer does"
    if why:
        yield Row(rank=Rank.NOT_COMPARED, what=PRINTS, text=why)
    else:
        yield from judge_prints(first.prints, again.prints, resumed.prints, steps)


def _with_line(row: Row, command: Sequence[str]) -> Row:
    """With the line of the script that is likely to be changed, where state was not loaded."""
    if row.rank not in (Rank.DATA, Rank.ANEW, Rank.PRINT, Rank.STATE):
        return row
    keys = [part for part in row.what.rpartition(": ")[2].split(".") if part.isidentifier()]
    line = likely_line(command, Path.cwd(), keys[0] if keys and row.rank is not Rank.DATA else "")
    return replace(row, advice="; ".join(words for words in (row.advice, line) if words))


def _common_step(places: Sequence[Place], steps: tuple[int, int]) -> int | None:
    """The last step up to 2k of which all three have a checkpoint."""
    shared = set.intersection(*(set(saved_in(place.out)) for place in places))
    return max((step for step in shared if steps[0] < step <= steps[1]), default=None)


def _verdicts_of(place: Place, resumed: Played) -> list[Row]:
    """What the guard said of the resume."""
    entries = read_journal(place.paths).entries
    found = [verdict for entry, verdict in events_of(entries, GuardVerdict) if entry.launch == resumed.launch]
    return [Row(rank=Rank.NOTE, what="the guard of the resume", text=one.verdict) for one in found[-1:]]


def _start_of(place: Place) -> LaunchStart | None:
    return next((start for _, start in events_of(read_journal(place.paths).entries, LaunchStart)), None)


def _names_out(words: Sequence[str]) -> bool:
    return any("{out}" in word for word in words)
