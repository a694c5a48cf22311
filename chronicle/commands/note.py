"""`chronicle note`: what a person saw, thinks, did or expects, as one entry; `$EDITOR` when no text is given."""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from chronicle.commands.options import JsonOption, LogsOption, RunOption, settings_from
from chronicle.commands.result import CommandResult
from chronicle.errors import ChronicleError, UsageProblem
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.objects import store_file
from chronicle.paths import RunPaths

__all__ = ["note"]

TEMPLATE = """
# What happened? The first line is the title. Lines starting with # are left out; an empty text aborts.
# Worth writing: what was seen, from which step, what you suspect, what you did, what you expect now.
# Run {run}.
"""


def note(
    text: Annotated[str | None, typer.Argument(help="The note; opens $EDITOR when left out.", show_default=False)] = None,
    step: Annotated[int | None, typer.Option(help="Optimizer step it is about.")] = None,
    attach: Annotated[list[Path] | None, typer.Option(help="File kept with the note (repeatable).")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Tag (repeatable).")] = None,
    suspect: Annotated[list[str] | None, typer.Option(help="Suspected cause, `cause: claim` (repeatable).")] = None,
    expect: Annotated[str | None, typer.Option(help="What should happen now; asked before the outcome.")] = None,
    amend: Annotated[str | None, typer.Option(help="Entry id that this note corrects.", metavar="ID")] = None,
    run: RunOption = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Write a note into the journal.

    Example: chronicle note "Xid 64 on ip-26-0-147-135, node drained" --step 16430 --tag hardware
    """
    settings = settings_from(run, logs)
    paths = settings.paths
    fresh = not paths.journal_dir.is_dir()
    refs = (read_journal(paths).find(amend).id,) if amend else ()
    title, body = _split(text if text is not None else _from_editor(settings.run))
    data: dict[str, Any] = {}
    if body:
        data["text"] = body
    if tag:
        data["tags"] = list(tag)
    if suspect:
        data["suspects"] = [_suspect(words) for words in suspect]
    if expect:
        data["expect"] = expect
    if attach:
        data["evidence"] = [store_file(paths, path) for path in attach]
    with JournalWriter(paths) as writer:
        entry = writer.append("amend" if amend else "note", step=step, title=title, refs=refs, data=data)
    talk = (f"new journal: {paths.journal_dir}",) if fresh else _contradicted(paths, f"{title}\n{body}")
    return CommandResult(text=f"{entry.id}  {title}", data={"id": entry.id, "title": title, "run": settings.run}, talk=talk)


def _contradicted(paths: RunPaths, text: str) -> tuple[str, ...]:
    """Numbers that the ranks' own records contradict; said after the note is written, which they never prevent."""
    if not any(character.isdigit() for character in text):
        return ()
    from chronicle.evidence.recheck import lint_note

    return lint_note(paths, text)


def _split(text: str) -> tuple[str, str]:
    """First line is the title, the rest the body."""
    lines = text.strip().splitlines()
    if not lines or not lines[0].strip():
        raise UsageProblem("empty note, nothing written", 'chronicle note "what happened"')
    return lines[0].strip(), "\n".join(lines[1:]).strip()


def _suspect(words: str) -> dict[str, str]:
    cause, _, claim = words.partition(":")
    return {"cause": cause.strip(), "claim": claim.strip(), "verdict": "open"}


def _from_editor(run: str) -> str:
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if editor is None and not sys.stdin.isatty():
        raise UsageProblem("no text given and no terminal to ask on", 'chronicle note "what happened"')
    with tempfile.TemporaryDirectory(prefix="chronicle-note-") as directory:
        path = Path(directory) / "NOTE.md"
        path.write_text(TEMPLATE.format(run=run), encoding="utf-8")
        try:
            done = subprocess.run([*shlex.split(editor or "vi"), str(path)], check=False)
        except OSError as problem:
            raise ChronicleError(f"cannot start the editor `{editor or 'vi'}`: {problem.strerror}") from problem
        if done.returncode != 0:
            raise ChronicleError(f"editor `{editor or 'vi'}` ended with code {done.returncode}, nothing written")
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))
