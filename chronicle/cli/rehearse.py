"""`chronicle rehearse -- <launcher …>`: kill a script, resume it, and compare it with the same script undisturbed."""

import re
import shlex
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from chronicle.cli.options import CommandResult, ExitCode, JsonOption, LogsOption, RunOption, settings_from
from chronicle.errors import UsageProblem
from chronicle.journal import Entry
from chronicle.journal.events import Rehearsed, events_of
from chronicle.launch.code import read_code
from chronicle.story.plain import format_age, say

CONTEXT: Mapping[str, Any] = {"allow_interspersed_args": False}
SIGNALS: Mapping[str, signal.Signals] = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "USR1": signal.SIGUSR1}


def rehearse(
    launcher: list[str] | None = None,
    at: int = 10,
    to: int = 20,
    signal_: str = "KILL",
    resume_args: str = "",
    resume_with: str = "",
    keep: Path | None = None,
    run: RunOption = None,
    logs: LogsOption = None,
    json: JsonOption = False,
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
      --signal NAME: KILL once a checkpoint is whole; or TERM, USR1: does it save by itself?
      --resume-args WORDS: Added to the command of the resume; `{checkpoint}` is what it resumes from.
      --resume-with COMMAND: The whole command of the resume, as with another number of ranks.
      --keep DIR: Write there, and keep it [a temporary directory].
    """
    from chronicle.rehearse.judge import Verdict
    from chronicle.rehearse.rehearse import Rehearsal, play_rehearsal
    from chronicle.rehearse.told import page, record, to_json

    number = SIGNALS.get(signal_.upper().removeprefix("SIG"))
    if number is None:
        raise UsageProblem(f"--signal {signal_}: expected {', '.join(SIGNALS)}")
    if not launcher:
        raise UsageProblem("no launcher given", "chronicle rehearse -- python train.py --output_dir {out}")
    asked = Rehearsal(
        command=tuple(launcher),
        at=at,
        to=to,
        signal=number,
        resume_args=tuple(shlex.split(resume_args)),
        resume_with=tuple(shlex.split(resume_with)),
    )
    settings = settings_from(run, logs)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started is ended first
    scratch = _scratch(keep)
    try:
        answer = play_rehearsal(asked, scratch, say)
    finally:
        if keep is None:
            shutil.rmtree(scratch, ignore_errors=True)
    entry = record(settings.paths, answer)
    codes = {
        Verdict.DIFFERS: ExitCode.FINDINGS, Verdict.NOT_DONE: ExitCode.REFUSED, Verdict.PARTLY: ExitCode.REFUSED,
    }  # fmt: skip
    code = codes.get(answer.verdict, ExitCode.DONE)
    return CommandResult(text=page(answer), data={"entry": entry.id, **to_json(answer)}, exit_code=code)


def said_of(command: Sequence[str], entries: Sequence[Entry], cwd: Path, now: float) -> str:
    """What the last rehearsal of this command found, in one line; "" where it was never rehearsed."""
    rehearsed = [(entry, event) for entry, event in events_of(entries, Rehearsed) if _is_of(event, command)]
    if not rehearsed:
        return ""
    entry, event = rehearsed[-1]
    age = format_age(max(0.0, now - datetime.fromisoformat(entry.ts).timestamp()))
    code = read_code(cwd, with_patch=False)
    is_same = code.commit is not None and (code.commit, code.digest) == (event.git_commit, event.git_dirty_digest)
    where = "with this code" if is_same else "with other code, as far as is known"
    return f"rehearsed {age} ago {where}: the script {event.verdict} ({event.signal} at step {event.at})"


def _is_of(event: Rehearsed, command: Sequence[str]) -> bool:
    """Whether this is the command of a rehearsal, whatever stands where its `{out}`, `{name}` and `{port}` stood."""
    return any(
        len(words) == len(command) and all(map(_is_same, words, command)) for words in (event.command, event.resume)
    )


def _is_same(pattern: str, word: str) -> bool:
    parts = re.split(r"\{(?:out|name|port|checkpoint)\}", pattern)
    return re.fullmatch(".*".join(map(re.escape, parts)), word, re.DOTALL) is not None


def _scratch(keep: Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="chronicle-rehearsal-")).resolve()
    if keep.exists() and any(keep.iterdir()):
        raise UsageProblem(f"--keep {keep}: it is not empty", "name a directory that does not exist")
    keep.mkdir(parents=True, exist_ok=True)
    return keep.resolve()


rehearse.context_settings = CONTEXT  # type: ignore[attr-defined]  # options after the launcher's name belong to the launcher
