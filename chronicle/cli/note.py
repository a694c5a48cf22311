"""`chronicle note`: what a person saw, thinks, did or expects, as one entry; `$EDITOR` when no text is given.

The fields are those that chronicles written by hand have in common: seen, suspects (claim, test, verdict), did (what was
changed), expected (asked before the outcome), rule learnt, evidence. What came out is said later, with `chronicle close`.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from chronicle.cli.completion import complete_entries
from chronicle.cli.options import CommandResult, JsonOption, LogsOption, RunOption, need_run, settings_from
from chronicle.errors import ChronicleError, UsageProblem
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.objects import store_file
from chronicle.paths import RunPaths
from chronicle.story import Story, read_story
from chronicle.story.plain import plain

__all__ = [
    "CloseOutcome",
    "close",
    "note",
]

TEMPLATE = """
# What happened? The first line is the title. Lines starting with # are left out; an empty text aborts.
# Worth writing: what was seen, from which step, what you suspect, what you did, what you expect now.
# Run {run}.
"""
VERDICTS = ("open", "supported", "refuted")


def note(
    text: Annotated[str | None, typer.Argument(help="The note; opens $EDITOR when left out.", show_default=False)] = None,
    step: Annotated[int | None, typer.Option(help="Optimizer step it is about.")] = None,
    launch: Annotated[int | None, typer.Option(help="Launch it is about.")] = None,
    incident: Annotated[bool, typer.Option("--incident", help="It is an incident: open until it is closed.")] = False,
    seen: Annotated[str | None, typer.Option(help="What was seen.")] = None,
    suspect: Annotated[
        list[str] | None, typer.Option(help="`cause: claim [| test [| open, supported or refuted]]` (repeatable).")
    ] = None,
    did: Annotated[list[str] | None, typer.Option(help="A change, `field: before -> after` (repeatable).")] = None,
    expect: Annotated[str | None, typer.Option(help="What should happen now; asked before the outcome.")] = None,
    rule: Annotated[str | None, typer.Option(help="A rule learnt, collected in the chronicle.")] = None,
    host: Annotated[list[str] | None, typer.Option(help="Host it is about (repeatable).")] = None,
    attach: Annotated[list[Path] | None, typer.Option(help="File kept with the note (repeatable).")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Tag (repeatable).")] = None,
    amend: Annotated[str | None, typer.Option(help="Entry id that this note corrects.", metavar="ID")] = None,
    run: RunOption = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Write a note into the journal.

    Example: chronicle note "Xid 64 on ip-26-0-147-135, node drained" --step 16430 --tag hardware
    """
    if amend and incident:
        raise UsageProblem("--amend corrects an entry, --incident begins one: expected one of them")
    settings = settings_from(run, logs)
    paths = settings.paths
    fresh = not paths.journal_dir.is_dir()
    refs = (read_journal(need_run(settings).paths).find(amend).id,) if amend else ()
    title, body = _split(text if text is not None else _from_editor(settings.run))
    words = {"text": body, "symptom": seen, "expect": expect, "rule": rule}
    data: dict[str, Any] = {key: value for key, value in words.items() if value}
    if suspect:
        data["suspects"] = [_suspect(claim) for claim in suspect]
    if did:
        data["action"] = {"verb": "change", "changes": [_change(change) for change in did]}
    if host:
        data["hosts"] = list(host)
    if tag:
        data["tags"] = list(tag)
    data |= _attachments(paths, attach or ())
    kind = "amend" if amend else "incident" if incident else "note"
    with JournalWriter(paths) as writer:
        entry = writer.append(kind, step=step, launch=launch, title=title, refs=refs, data=data)
    talk = [f"new journal: {paths.journal_dir}"] if fresh else [*_contradicted(paths, f"{title}\n{body}")]
    if incident:
        talk.append(f'when you know what came of it: chronicle close {entry.id[-8:]} --outcome worked|failed|partly "…"')
    result = {"id": entry.id, "kind": kind, "title": title, "run": settings.run}
    return CommandResult(text=f"{entry.id}  {plain(title)}", data=result, talk=tuple(talk))


def _contradicted(paths: RunPaths, text: str) -> tuple[str, ...]:
    """Numbers that the ranks' own records contradict; said after the note is written, which they never prevent."""
    if not any(character.isdigit() for character in text):
        return ()
    from chronicle.audit.claims import lint_note

    return lint_note(paths, text)


def _split(text: str) -> tuple[str, str]:
    """First line is the title, the rest the body."""
    lines = text.strip().splitlines()
    if not lines or not lines[0].strip():
        raise UsageProblem("empty note, nothing written", 'chronicle note "what happened"')
    return lines[0].strip(), "\n".join(lines[1:]).strip()


def _suspect(words: str) -> dict[str, str]:
    """`cause: claim | test | verdict`; only the cause must be there."""
    first, *rest = (part.strip() for part in words.split("|"))
    cause, _, claim = first.partition(":")
    verdict = rest[1] if len(rest) > 1 else "open"
    if not cause.strip() or verdict not in VERDICTS:
        raise UsageProblem(
            f"--suspect {words}: expected `cause: claim | test | verdict`, the verdict one of {', '.join(VERDICTS)}"
        )
    out = {"cause": cause.strip(), "claim": claim.strip(), "verdict": verdict}
    return out | ({"test": rest[0]} if rest and rest[0] else {})


def _change(words: str) -> dict[str, str]:
    name, colon, values = words.partition(":")
    before, arrow, after = values.partition("->")
    if not colon or not arrow or not name.strip():
        raise UsageProblem(f"--did {words}: expected `field: before -> after`")
    return {"field": name.strip(), "before": before.strip(), "after": after.strip()}


def _attachments(paths: RunPaths, files: Sequence[Path]) -> dict[str, Any]:
    return {"evidence": [store_file(paths, path) for path in files]} if files else {}


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


# --- chronicle close


class CloseOutcome(StrEnum):
    """What came of an intervention."""

    WORKED = "worked"
    FAILED = "failed"
    PARTLY = "partly"
    INTERRUPTED = "interrupted"
    INCONCLUSIVE = "inconclusive"
    SUPERSEDED = "superseded"


ONLY_OPEN = "open"  # never the end of an id: its alphabet has no O
NOT_CLOSABLE = ("close", "amend", "run.init", "launch.start", "launch.step", "launch.end", "checkpoint")


def close(
    entry_id: Annotated[
        str,
        typer.Argument(
            help="Entry that this is the outcome of; `open`: the only one that is open.",
            metavar="ID",
            autocompletion=complete_entries,
        ),
    ],
    text: Annotated[str | None, typer.Argument(help="What came out, in words.", show_default=False)] = None,
    outcome: Annotated[CloseOutcome | None, typer.Option(help="What came of it.", show_default=False)] = None,
    rule: Annotated[str | None, typer.Option(help="A rule learnt from it, collected in the chronicle.")] = None,
    run: RunOption = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Say what came of an incident, a rollback or a note.

    Example: chronicle close 7Q2K9XAB --outcome worked "no spike for 3000 steps"
    """
    if outcome is None:
        raise UsageProblem(
            "no outcome given, nothing written: expected --outcome " + "|".join(o.value for o in CloseOutcome),
            f'chronicle close {entry_id} --outcome worked "…"',
        )
    settings = need_run(settings_from(run, logs))
    journal = read_journal(settings.paths)
    story = read_story(settings.paths, journal=journal)
    entry = journal.find(_only_open(story) if entry_id == ONLY_OPEN else entry_id)
    if entry.kind in NOT_CLOSABLE:
        message = f"entry {plain(entry.id)} is a `{plain(entry.kind)}`: it has no outcome"
        raise UsageProblem(message, "`chronicle status` lists what is open")
    data: dict[str, Any] = {"outcome": outcome.value}
    if text:
        data["text"] = text
    if rule:
        data["rule"] = rule
    expected = entry.data.get("expect")
    with JournalWriter(settings.paths) as writer:
        title = f"{outcome.value}: {entry.title}"[:200]
        written = writer.append("close", step=story.headline.step or None, title=title, refs=(entry.id,), data=data)
    talk = (f"expected was: {plain(expected)}",) if expected else ()
    result = {"id": written.id, "closes": entry.id, "outcome": outcome.value, "run": settings.run}
    return CommandResult(text=f"{written.id}  {plain(written.title)}", data=result, talk=talk)


def _only_open(story: Story) -> str:
    ids = [matter.first_id for matter in story.open_matters] + [x.entry.id for x in story.interventions if x.open]
    if len(ids) == 1:
        return ids[0]
    listed = ": " + ", ".join(entry_id[-8:] for entry_id in ids) if ids else ""
    found = f"`open` means the only entry that is open, there are {len(ids)}{listed}"
    raise UsageProblem(found, "name one: chronicle close ID …")
