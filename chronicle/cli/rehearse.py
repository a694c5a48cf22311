"""`chronicle rehearse -- <launcher …>`: kill a script, resume it, and compare it with the same script undisturbed."""

import os
import shlex
import shutil
import signal
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chronicle.cli.options import IN_RUN, CommandResult, ExitCode, InRun
from chronicle.errors import UsageProblem
from chronicle.journal import Entry, read_journal
from chronicle.journal.events import Rehearsed, events_of, is_of
from chronicle.launch.beside import wait_for_end
from chronicle.launch.code import read_code
from chronicle.paths import RunPaths
from chronicle.story.plain import format_age, say
from rollback.disk.lock import hold_lock

if TYPE_CHECKING:
    from chronicle.rehearse.rehearse import Rehearsal

KEPT = "rehearsal"  # below the run's directory
LAST_SECONDS = 60  # for what was started beside a launch, after its end

CONTEXT: Mapping[str, Any] = {"allow_interspersed_args": False}
# by what is asked for alone: the first is sent where none is named
ASKING = ("TERM", "USR1", "USR2", "INT")  # `chronicle run` passes USR2 on as TERM
SIGNALS = {"": ("KILL", *ASKING), "kill": ("KILL",), "data": ("KILL",), "term": ASKING}


def rehearse(
    launcher: list[str] | None = None,
    at: int = 10,
    to: int = 20,
    signal_: str = "",
    resume_args: str = "",
    resume_with: str = "",
    only: str = "",
    keep: Path | None = None,
    where: InRun = IN_RUN,
) -> CommandResult:
    """Prove that a script can be killed and resumed.

    It is launched four times in scratch directories: twice undisturbed to step --to, once ended by a signal at step --at,
    and resumed. Compared are all logged values, every file of the last checkpoint by name, and, where a guard is attached,
    each step's batch, generators, gradient and weights. What two undisturbed launches differ in counts as nobody's fault.

    Example: chronicle rehearse -- torchrun --nproc_per_node 2 train.py --output_dir {out}

    One that is told to resume:
    chronicle rehearse --resume-args '--resume_from_checkpoint {checkpoint}' -- python train.py --output_dir {out}

    `{out}`, `{name}` and `{port}` stand for an output directory, a name and a free port of each launch. Without `{out}` each
    runs in a copy of the working directory. The HF Trainer saves
    and ends at the steps that are asked for; other scripts by their own arguments, or they are ended at that step.

    Returns 0 when the resume was exact, or as equal as two undisturbed launches are; 5 when something differs; 3 when it
    could not be told, or not of everything.

    Options:
      LAUNCHER: The launcher and its arguments, after `--`.
      --at N: The step after which it is ended.
      --to N: The last step that is compared.
      --signal NAME: KILL once a checkpoint is whole; or TERM, USR1, USR2, INT: does it save by itself?
      --resume-args WORDS: Added to the command of the resume; `{checkpoint}` is what it resumes from.
      --resume-with COMMAND: The whole command of the resume, as with another number of ranks.
      --only WHAT: kill (as --signal KILL), term (what another --signal saves; one launch), data (two steps after --at), or
        save (beside a launch, until stdin ends: its first save; `[rehearse] first_save = true` starts it).
      --keep DIR: Write there, and keep all of it.
    """
    from chronicle.rehearse.judge import Verdict
    from chronicle.rehearse.kept import identity_of, said_before, tidy
    from chronicle.rehearse.rehearse import play_rehearsal
    from chronicle.rehearse.told import page, record, to_json

    if not launcher:
        raise UsageProblem("no launcher given", "chronicle rehearse -- python train.py --output_dir {out}")
    settings = where.settings()
    if only == "save":
        return _try_first_save(settings.paths, launcher)
    asked = _asked(launcher, (at, to), signal_, only, (shlex.split(resume_args), shlex.split(resume_with)))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started is ended first
    identity = identity_of(asked.command, (asked.at, asked.to), Path.cwd(), os.environ)
    scratch = _scratch(keep, settings.paths.run_dir / KEPT / (identity or "unknown")[:16])
    entries = read_journal(settings.paths).entries if settings.paths.journal_dir.is_dir() else []
    last = _last_of(asked.command, entries)
    with hold_lock(scratch.parent / "lock"):
        shutil.rmtree(scratch / "b", ignore_errors=True)
        say(said_before(scratch, asked.to, last[1].seconds if last else None, is_one=asked.only == "term"))
        try:
            answer = play_rehearsal(asked, scratch, say)
        finally:
            if keep is None:
                tidy(scratch, is_known=identity is not None)
    entry = record(settings.paths, answer)
    codes = {
        Verdict.DIFFERS: ExitCode.FINDINGS, Verdict.LOST: ExitCode.FINDINGS,
        Verdict.NOT_DONE: ExitCode.REFUSED, Verdict.PARTLY: ExitCode.REFUSED,
    }  # fmt: skip
    code = codes.get(answer.verdict, ExitCode.DONE)
    return CommandResult(lines=list(page(answer)), data={**to_json(answer), "entry": entry.id}, exit_code=code)


def _asked(
    launcher: Sequence[str], steps: tuple[int, int], signal_: str, only: str, resume: tuple[Sequence[str], Sequence[str]]
) -> "Rehearsal":
    from chronicle.rehearse.rehearse import DATA_STEPS, Rehearsal

    at, to = steps
    names = SIGNALS.get(only)
    if names is None:
        raise UsageProblem(f"--only {only}: expected kill, term, data or save")
    name = signal_.upper().removeprefix("SIG") or names[0]
    if name not in names:
        raise UsageProblem(f"--signal {signal_}: expected {', '.join(names)}" + (f" with --only {only}" if only else ""))
    return Rehearsal(
        command=tuple(launcher),
        at=at,
        to=min(to, at + DATA_STEPS) if only == "data" else to,
        signal=f"SIG{name}",
        resume=tuple(resume[1]) or (*launcher, *resume[0]),
        only="" if only == "kill" else only,
    )


def _last_of(command: Sequence[str], entries: Sequence[Entry]) -> tuple[Entry, Rehearsed] | None:
    """The last rehearsal of this command."""
    found = [(entry, event) for entry, event in events_of(entries, Rehearsed) if event.signal and is_of(event, command)]
    return found[-1] if found else None


def said_of(command: Sequence[str], entries: Sequence[Entry], cwd: Path, now: float) -> str:
    """What the last rehearsal of this command found, in one line."""
    last = _last_of(command, entries)
    if last is None:
        return "never rehearsed: `chronicle rehearse -- …` shows whether this script resumes exactly"
    entry, event = last
    age = format_age(max(0.0, now - datetime.fromisoformat(entry.ts).timestamp()))
    code = read_code(cwd, with_patch=False)
    is_same = (code.commit, code.digest) == (event.git_commit, event.git_dirty_digest)
    where = "with this code" if is_same else "with other code"
    if code.commit is None or event.git_commit is None:
        where = "(no commit says with which code)"
    return f"rehearsed {age} ago {where}: {event.verdict} ({event.signal} at step {event.at})"


def _try_first_save(paths: RunPaths, command: Sequence[str]) -> CommandResult:
    """Beside a launch: its first save is loaded in a second process; one line, and one entry of the journal."""
    from chronicle.rehearse.first_save import rehearse_first_save
    from chronicle.rehearse.told import page, record

    last = _last_of(command, read_journal(paths).entries if paths.journal_dir.is_dir() else [])
    if last is None:
        say("the first save is not tried: nobody knows how this command resumes; rehearse it once: `chronicle rehearse -- …`")
        return CommandResult()
    over = threading.Event()
    threading.Thread(target=wait_for_end, args=(over, LAST_SECONDS), daemon=True).start()
    scratch = _scratch(None, paths.run_dir / KEPT / "first_save")
    try:
        found = rehearse_first_save(paths, last[1], command, scratch, over)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if found is not None:
        launch, answer = found
        say("\n".join([f"first save: {record(paths, answer, launch).title}", *page(answer)]))
    return CommandResult()


def _scratch(keep: Path | None, kept: Path) -> Path:
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise UsageProblem(f"--keep {keep}: it is not empty", "name a directory that does not exist")
    scratch = keep or kept
    scratch.mkdir(parents=True, exist_ok=True)
    return scratch.resolve()


rehearse.context_settings = CONTEXT  # type: ignore[attr-defined]  # options after the launcher's name belong to the launcher
