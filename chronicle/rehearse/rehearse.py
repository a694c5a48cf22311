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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from chronicle.errors import ChronicleError, UsageProblem
from chronicle.journal.events import LaunchStart
from chronicle.launch.handover import RESUME_FROM, RESUME_STEP
from chronicle.prints.compared import PARTS
from chronicle.rehearse.judge import (
    Compared,
    Rank,
    Row,
    Sides,
    Verdict,
    compare_values,
    judge,
    judge_prints,
    logged_leaves,
)
from chronicle.rehearse.kept import PLAYED, ensure_room, mark_played
from chronicle.rehearse.launches import Place, Played, Until, environment_of, play, read_played
from chronicle.rehearse.script import lines_with, refuse_outside
from chronicle.resume.rehearsal import Asked
from rollback.checkpoint.below import saved_in
from rollback.checkpoint.layout import Checkpoint
from rollback.checks.leaves import Leaves, Value, read_leaves
from rollback.disk.content import MAX_POINTER_BYTES

KILL = "SIGKILL"
DATA_STEPS = 2  # after k, with `--only data`
BATCH = PARTS["batch"][1]
PRINTS = "batches, generators, gradients and weights of each step"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What is asked for."""

    command: tuple[str, ...]
    at: int
    to: int
    signal: str  # SIGKILL; "": a first save, which nothing ended
    resume: tuple[str, ...] = ()  # the command of the resume
    only: str = ""  # "", "term" or "data"

    def __post_init__(self) -> None:
        if not 0 < self.at < self.to:
            raise UsageProblem(f"--at {self.at} --to {self.to}: expected 0 < at < to")
        if self.resume and ("{out}" in " ".join(self.resume)) is not self.names_out:
            remedy = "put it into both, or into none: then each runs in a copy of this directory"
            raise UsageProblem("{out} is in one of the two commands only", remedy)

    @property
    def names_out(self) -> bool:
        """Whether the command says where it writes."""
        return "{out}" in " ".join(self.command)

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
    start: LaunchStart = field(default_factory=LaunchStart)  # of B: its code and packages
    resumed_at: int | None = None  # step of the checkpoint that B resumed from
    compared_at: int | None = None  # step of the checkpoints that were compared
    ranks: int | None = None  # of A; None: not known

    @property
    def verdict(self) -> Verdict:
        """The word for it."""
        return judge(self.compared)


def play_rehearsal(asked: Rehearsal, scratch: Path, say: Say) -> Answer:
    """Play the launches in `scratch` and compare. Raises `ChronicleError` where a launch could not be played."""
    began = time.monotonic()
    is_copy = not asked.names_out
    first_place, again_place, broken = (Place(name=name, scratch=scratch, is_copy=is_copy) for name in ("a", "again", "b"))
    if is_copy:
        refuse_outside(asked.command, Path.cwd())
        say("no {out} in the command: each launch runs in a copy of this directory")
    if asked.only != "term":
        first, again = _pair(asked, first_place, again_place, say)
    ended = _ended(asked, broken, say)
    anyway = saved_in(first_place.out).keys() or due_after(ended.saved_before, 2 * asked.to)
    rows = [answer_to_signal(asked, ended, anyway)]
    compared, target, at = Compared(rows=()), None, None
    if asked.only == "term":
        compared = Compared(rows=(), basis=Verdict.SAVES if rows[0].rank is Rank.NOTE else Verdict.NOT_DONE)
    else:
        target, why = _target(asked, broken, ended)
        rows += why
    if target is not None and target.step is not None:
        saved = leaves_of(target.path, target.step, broken.out)
        handed = {RESUME_FROM: str(target.path), RESUME_STEP: str(target.step)}
        resumed = _to_the_end(asked, broken, broken.fill(asked.resume, target.path), handed)
        compared, at = _compare(asked, (first, again, resumed), saved, (target.step, asked.to))
    told = (_with_line(row, asked.command) for row in (*rows, *compared.rows))
    return Answer(
        asked=asked,
        compared=replace(compared, rows=tuple(told)),
        resumed_at=None if target is None else target.step,
        compared_at=at,
        seconds=time.monotonic() - began,
        start=ended.start,
        ranks=ended.ranks,
    )


def _pair(asked: Rehearsal, first: Place, again: Place, say: Say) -> tuple[Played, Played]:
    """A and A′: those of an earlier rehearsal of the same, or played now."""
    if (first.scratch / PLAYED).exists():
        ranks = int((first.scratch / PLAYED).read_text())
        one, two = (read_played(place.paths, place.out, 1, ranks) for place in (first, again))
        return one, two
    one = _undisturbed(asked, first, say)
    ensure_room(first.scratch)
    two = _undisturbed(asked, again, say)
    mark_played(first.scratch, one.ranks)
    return one, two


# --- the launches


def _undisturbed(asked: Rehearsal, place: Place, say: Say) -> Played:
    played = _to_the_end(asked, place, place.fill(asked.command), {})
    say(f"{place.name}, undisturbed: {played.last_step} steps in {played.seconds:.0f} s")
    if played.reached < asked.to:
        raise ChronicleError(
            f"the undisturbed launch came to step {played.reached} of {asked.to}: {played.end}{played.last_words}",
            "steps are known from a guard or from printed lines; --keep keeps its output, --at and --to name other steps",
        )
    return played


def _to_the_end(asked: Rehearsal, place: Place, words: Sequence[str], handed: Mapping[str, str]) -> Played:
    """Until the checkpoint of the last step is whole, or it is as far again as from k to 2k."""
    steps = Asked(save=asked.at, hold=asked.to, end=asked.to)
    return play(place, words, environment_of(steps, handed), Until(step=2 * asked.to - asked.at, saved=asked.to))


def _ended(asked: Rehearsal, place: Place, say: Say) -> Played:
    """B to step k, and the signal."""
    steps, until = Asked(end=asked.to), Until(step=asked.at, signal=signal.Signals[asked.signal])
    if asked.signal == KILL:
        steps = Asked(save=asked.at, hold=asked.at, end=asked.to)
        until = Until(step=asked.to + asked.at, saved=asked.at)
    played = play(place, place.fill(asked.command), environment_of(steps, {}), until)
    say(f"{place.name}: {asked.signal} after step {played.last_step}")
    return played


def _target(asked: Rehearsal, place: Place, ended: Played) -> tuple[Checkpoint | None, list[Row]]:
    """The checkpoint that B resumes from: what a pointer names, else the first. What was saved later is moved away."""
    saves = ended.saves
    if saves and asked.signal != KILL:
        return saves[max(saves)], []
    usable = [step for step in saves if asked.at <= step < asked.to]
    if not usable:
        text = f"none from step {asked.at} to {asked.to}; {len(ended.listed)} found, of steps {sorted(saves)}: {SAVE_MORE}"
        return None, [Row(Rank.NOT_COMPARED, "checkpoints", text)]
    pointers = read_pointers(place.out)
    named = [step for step, one in saves.items() if one.path.name in pointers]
    target = max(named, default=min(usable))
    if target >= asked.to:
        text = f"when it was ended, `{pointers[saves[target].path.name]}` named that of step {target}: name a later --to"
        return None, [Row(Rank.NOT_COMPARED, "checkpoints", text)]
    later = [one for step, one in saves.items() if step > target]
    for one in later:
        aside = place.scratch / place.name / "later"
        aside.mkdir(exist_ok=True)
        one.path.rename(aside / one.path.name)
    text = f"the script was faster than the signal: {len(later)} later checkpoints were moved away before the resume"
    return saves[target], [Row(Rank.NOTE, text)] if later else []


def read_pointers(out: Path) -> dict[str, str]:
    """What the links and small text files below a directory name, as `latest` does: name -> the pointer's own name."""
    found: dict[str, str] = {}
    for path in sorted(out.rglob("*")):
        told = ""
        if path.is_symlink():
            told = str(path.readlink())
        elif path.is_file() and path.stat().st_size <= MAX_POINTER_BYTES:
            told = path.read_bytes().decode("latin-1").strip()
        found[told.rpartition("/")[2]] = path.name
    return found


SOON = 2  # steps from a signal to the save that answers it
LISTEN_SECONDS = 5.0  # in which an answer may still come: the HF Trainer waits 3 s before it saves
SAVE_MORE = "save more often, or name steps at which it saves: --at, --to"
SAVES_AT_SIGNAL = (
    "HF: TrainingArguments(enable_jit_checkpoint=True); Lightning: SLURMEnvironment(requeue_signal=…); "
    "other loops: signal.signal(…) that sets a flag, and a save at the next step"
)


def due_after(saved: Collection[int], last: int) -> set[int]:
    """The steps up to `last` at which a launch saves that has saved at these: in equal distances from its beginning."""
    gaps = [after - before for before, after in pairwise(sorted({0, *saved}))]
    return set(range(0, last, min(gaps))) if gaps else set()


def answer_to_signal(asked: Rehearsal, ended: Played, anyway: Collection[int] = ()) -> Row:
    """How B ended: a difference where a signal is to be answered by a save, and was not. `anyway`: steps of scheduled saves."""
    saves, last, name = ended.saves, max(ended.last_step, ended.told_at), asked.signal.removeprefix("SIG")
    took = f"{ended.ended_in or 0:.1f} s"
    if ended.ended_in is None:
        return Row(Rank.NOT_COMPARED, name, f"it was not sent: the launch ended after step {last}: {ended.end}")
    if asked.signal == KILL:
        return Row(Rank.NOTE, f"SIGKILL after step {last}", f"it ended with code {ended.exit_code} in {took}")
    after = sorted(saves.keys() - ended.saved_before)
    new = [step for step in after if step not in anyway]
    if after and not new and after[0] - ended.told_at <= SOON:
        return Row(Rank.NOT_COMPARED, name, f"the save of step {after[0]} was due anyway; name another --at")
    if new and last < asked.to:
        failed = f", and then it failed with code {ended.own_code}" if 0 < ended.own_code < 128 else ""
        return Row(Rank.NOTE, name, f"saved at step {new[-1]} within {took}{failed}")
    if new and new[0] - ended.told_at <= SOON:
        return Row(Rank.NOTE, name, f"it came after step {ended.told_at}: saved at step {new[0]}, and went on to step {last}")
    listened = ended.ended_in if ended.stepped_for is None else max(0.0, ended.stepped_for)
    if last >= asked.to and listened < LISTEN_SECONDS:
        text = f"it came after step {ended.told_at}, and the last step, {last}, was {listened:.1f} s later: name a later --to"
        return Row(Rank.NOT_COMPARED, name, text)
    text = f"nothing saved, {max(0, last - max(saves, default=0))} steps lost; it ended with code {ended.exit_code} in {took}"
    if last >= asked.to:
        text = f"it came after step {ended.told_at}, and was not heard: the launch went on to step {last}"
    return Row(Rank.SIGNAL, name, text, SAVES_AT_SIGNAL)


# --- comparing


def _compare(
    asked: Rehearsal, played: tuple[Played, Played, Played], saved: Leaves, steps: tuple[int, int]
) -> tuple[Compared, int | None]:
    first, again, resumed = played
    if abs(first.last_step - max(first.saves, default=0)) > asked.to - asked.at:  # printed are epochs, or steps of an epoch
        first, again, resumed = (replace(one, points=()) for one in played)
    rows = [*begun(resumed, steps[0], asked.to), *of_prints(first, again, resumed, steps)]
    if asked.only == "data":
        is_told = not any(row.rank >= Rank.NOT_COMPARED and row.what in (PRINTS, BATCH) for row in rows)
        return Compared(rows=tuple(rows), basis=Verdict.DATA if is_told else Verdict.NOT_DONE), None
    leaves = [logged_leaves(one.points, steps[0] - 1, asked.to) for one in (first, again)]
    leaves.append(logged_leaves(resumed.points, *steps))
    shared = set.intersection(*(set(one.saves) for one in played))
    at = max((step for step in shared if steps[0] < step <= steps[1]), default=None)
    if at is None:
        rows.append(Row(Rank.NOT_COMPARED, "files", f"no checkpoint after step {steps[0]} that all launches saved"))
    else:
        for found, one in zip(leaves, played, strict=True):
            found |= leaves_of(one.saves[at].path, at, one.out)
    sides = Sides(first=leaves[0], again=leaves[1], resumed=leaves[2], saved=saved, step=steps[0])
    compared = compare_values(sides, asked.options_of_resume, (first.ranks, resumed.ranks))
    if not compared.num_values:
        rows.append(Row(Rank.NOT_COMPARED, "logged values", "none of the same step and name in both launches"))
    return replace(compared, rows=(*rows, *compared.rows)), at


def leaves_of(checkpoint: Path, step: int, out: Path) -> dict[str, Value]:
    """Every value in all files of a checkpoint. `out`: where its launch wrote, which may stand in texts."""
    files = {"": checkpoint}
    if checkpoint.is_dir():
        files = {str(path.relative_to(checkpoint)): path for path in sorted(checkpoint.rglob("*")) if path.is_file()}
    places = {str(out): "{out}", str(out.parent): "{scratch}"}
    return read_leaves(files, step, places, out.parent / "unpacked")


def begun(resumed: Played, step: int, to: int) -> Iterator[Row]:
    """Where the resume began and came to, if that is wrong, and what the guard said of it."""
    begun = resumed.first_step
    if begun is not None and begun < step:
        text = f"took step {begun} first: it did not go on from step {step}"
        yield Row(Rank.START, "the resume", text, "say how it resumes: --resume-args '…', or --resume-with '…'")
    elif resumed.reached < to:
        yield Row(Rank.START, "the resume", f"ended at step {resumed.reached} of {to}: {resumed.end}")
    for event in resumed.guard:
        wrong = [f"{one['name']}: {one.get('expected', '')} → {one.get('found', '')}" for one in event.checks if not one["ok"]]
        yield Row(Rank.STATE if wrong else Rank.NOTE, "the guard at the resume", "; ".join(wrong) or event.verdict)


def of_prints(first: Played, again: Played, resumed: Played, steps: tuple[int, int]) -> Iterator[Row]:
    """What the prints of the guard say, or why they say nothing."""
    counted_from = min(resumed.printed, default=0)
    why = ""
    if not first.prints or not resumed.prints:
        why = "no guard was attached (docs/guard.md)"
    elif first.ranks != resumed.ranks:
        why = f"{first.ranks} and {resumed.ranks} ranks read other batches"
    elif counted_from <= steps[0]:
        why = f"the guard counted its steps from {counted_from}, as the optimizer does"
    if why:
        yield Row(Rank.NOT_COMPARED, PRINTS, why)
    else:
        yield from judge_prints(first.prints, again.prints, resumed.prints, steps)


def _with_line(row: Row, command: Sequence[str]) -> Row:
    """With the lines of the script that save or load this key of its state: one of them is likely to be changed."""
    key = row.what.rpartition(": ")[2].partition(".")[0]
    if row.rank not in (Rank.ANEW, Rank.STATE, Rank.TENSORS) or not key.isidentifier():
        return row
    return replace(row, advice=lines_with(command, Path.cwd(), key))
