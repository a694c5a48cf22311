"""`chronicle note` records what a person saw, suspects, did or expects, and what came of it.

The fields are those that hand-written chronicles have in common: seen, suspects (claim, test, verdict), did (the change),
expected, rule learnt, evidence. Without a text, `note` opens `$EDITOR`.
"""

import os
import shlex
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Option

from chronicle.cli.completion import complete_entries
from chronicle.cli.options import IN_RUN, CommandResult, InRun, need_run
from chronicle.errors import ChronicleError, UsageProblem
from chronicle.journal.events import Amendment, Close, EntryKind, Incident, Note, Words
from chronicle.journal.writer import JournalWriter, store_file
from chronicle.paths import RunPaths
from chronicle.story.plain import plain

TEMPLATE = """
# What happened? The first line is the title. Lines starting with # are ignored. An empty text aborts.
# Useful: what you saw, from which step on, what you suspect, what you did, what you expect now.
# Run {run}.
"""
VERDICTS = ("open", "supported", "refuted")
ONLY_OPEN = "open"  # no id ends like this: their alphabet has no O
NOT_CLOSABLE = (
    *(EntryKind.CLOSE, EntryKind.AMEND, EntryKind.RUN_INIT, EntryKind.CHECKPOINT),
    *(EntryKind.LAUNCH_START, EntryKind.LAUNCH_STEP, EntryKind.LAUNCH_END),
)


class CloseOutcome(StrEnum):
    """The outcome of an intervention."""

    WORKED = "worked"
    FAILED = "failed"
    PARTLY = "partly"
    INTERRUPTED = "interrupted"
    INCONCLUSIVE = "inconclusive"
    SUPERSEDED = "superseded"


def note(
    text: str | None = None,
    step: int | None = None,
    launch: int | None = None,
    incident: bool = False,
    seen: str | None = None,
    suspect: list[str] | None = None,
    did: list[str] | None = None,
    expect: str | None = None,
    rule: str | None = None,
    host: list[str] | None = None,
    attach: list[Path] | None = None,
    tag: list[str] | None = None,
    amend: str | None = None,
    close: Annotated[
        str | None,
        Option(
            "--close",
            help="Record the outcome of this entry; `open` for the only one that is open.",
            metavar="ID",
            autocompletion=complete_entries,
        ),
    ] = None,
    outcome: CloseOutcome | None = None,
    at: InRun = IN_RUN,
) -> CommandResult:
    """Write a note, or the outcome of an open entry.

    Example: chronicle note "Xid 64 on ip-26-0-147-135, node drained" --step 16430 --tag hardware

    The outcome of an incident, a rollback or a note: chronicle note --close open --outcome worked "no spike since"

    Options:
      TEXT: Text of the note; `-` reads standard input. Without it, $EDITOR opens.
      --step: Optimizer step of the note.
      --launch: Launch of the note.
      --incident: Record an incident, which is open until it is closed.
      --seen: What was seen.
      --suspect: Suspect, as `cause: claim [| test [| open, supported or refuted]]` (repeatable).
      --did: Change, as `field: before -> after` (repeatable).
      --expect: What you expect now, before the outcome is known.
      --rule: Rule learnt; the report collects them.
      --host: Host of the note (repeatable).
      --attach: File to keep with the note (repeatable).
      --tag: Tag (repeatable).
      --amend ID: Entry id that this note corrects.
      --outcome: What came of the entry that --close names.
    """
    if close is not None or outcome is not None:
        others = (seen, suspect, did, expect, host, attach, tag, amend, incident or None, step, launch)
        if any(one is not None for one in others):
            raise UsageProblem("--close takes a text, --outcome and --rule alone", "write the rest as a note of its own")
        return _close(close, text, outcome, rule, at)
    if step is not None and step < 0:
        raise UsageProblem(f"--step {step}: expected 0 or more")
    if amend and incident:
        raise UsageProblem("--amend and --incident are both given: expected one of them")
    settings = at.settings()
    paths = settings.paths
    fresh = not paths.journal_dir.is_dir()
    refs = (_find_entry(need_run(settings).paths, amend),) if amend else ()
    if text == "-":
        text = sys.stdin.read()
    title, body = _split(text if text is not None else _from_editor(settings.run))
    said = {
        "text": body,
        "symptom": seen,
        "expect": expect,
        "rule": rule,
        "suspects": [_suspect(claim) for claim in suspect or ()],
        "action": {"verb": "change", "changes": [_change(change) for change in did]} if did else None,
        "hosts": host,
        "tags": tag,
        "evidence": [store_file(paths, path) for path in attach or ()],
    }
    kind = Incident if incident else Note
    event = (Amendment if amend else kind).from_json({name: value for name, value in said.items() if value})
    with JournalWriter(paths) as writer:
        entry = writer.write(event, step=step, launch=launch, title=title, refs=refs)
    talk = [f"new journal: {paths.journal_dir}"] if fresh else []
    if incident:
        talk.append(f"record the outcome with: chronicle note --close {entry.id[-8:]} --outcome worked")
    result = {"id": entry.id, "kind": entry.kind, "title": title, "run": settings.run}
    return CommandResult(lines=f"{entry.id}  {title}", data=result, talk=talk)


def _close(entry_id: str | None, text: str | None, outcome: CloseOutcome | None, rule: str | None, at: InRun) -> CommandResult:
    """Write the outcome of an entry; `open` names the only one that is open."""
    if entry_id is None:
        raise UsageProblem("--outcome needs an entry: name it with --close ID", "`chronicle status` lists what is open")
    if outcome is None:
        words = f"chronicle note --close {entry_id} --outcome worked"
        raise UsageProblem("no outcome given: expected --outcome " + "|".join(CloseOutcome), words)
    from chronicle.journal.events import read as read_event
    from chronicle.journal.reader import read_journal
    from chronicle.story import read_story

    settings = at.existing()
    journal = read_journal(settings.paths)
    story = read_story(settings.paths, journal=journal)
    if entry_id == ONLY_OPEN:
        ids = story.open_ids
        if len(ids) != 1:
            listed = f"{len(ids)} entries are open{': ' if ids else ''}{', '.join(one[-8:] for one in ids)}"
            raise UsageProblem(f"{listed}: `open` expects one", "name it: chronicle note --close ID …")
        entry_id = ids[0]
    entry = journal.find(entry_id)
    if entry.kind in NOT_CLOSABLE:
        message = f"entry {plain(entry.id)} is a `{plain(entry.kind)}`: it has no outcome"
        raise UsageProblem(message, "`chronicle status` lists what is open")
    closed = read_event(entry)
    with JournalWriter(settings.paths) as writer:
        said = {"outcome": outcome.value, "text": text, "rule": rule}
        event = Close.from_json({name: value for name, value in said.items() if value})
        title = f"{outcome.value}: {entry.title}"[:200]
        written = writer.write(event, step=story.headline.step or None, title=title, refs=(entry.id,))
    talk = (f"expected: {closed.expect}",) if isinstance(closed, Words) and closed.expect else ()
    result = {"id": written.id, "closes": entry.id, "outcome": outcome.value, "run": settings.run}
    return CommandResult(lines=[f"{written.id}  {written.title}"], data=result, talk=talk)


def _find_entry(paths: RunPaths, wanted: str) -> str:
    """The id of the entry that is amended."""
    from chronicle.journal.reader import read_journal  # a plain note starts without it

    return read_journal(paths).find(wanted).id


def _split(text: str) -> tuple[str, str]:
    """(title, body): the first line, and the rest."""
    lines = text.strip().splitlines()
    if not lines or not lines[0].strip():
        raise UsageProblem("empty note: nothing written", 'chronicle note "what happened"')
    return lines[0].strip(), "\n".join(lines[1:]).strip()


def _suspect(words: str) -> dict[str, str]:
    """Parse `cause: claim | test | verdict`; only the cause is required."""
    first, *rest = (part.strip() for part in words.split("|"))
    cause, _, claim = first.partition(":")
    verdict = rest[1] if len(rest) > 1 else "open"
    if not cause.strip() or verdict not in VERDICTS:
        raise UsageProblem(
            f"--suspect {words}: expected `cause: claim | test | verdict` with a verdict of {', '.join(VERDICTS)}"
        )
    out = {"cause": cause.strip(), "claim": claim.strip(), "verdict": verdict}
    return out | ({"test": rest[0]} if rest and rest[0] else {})


def _change(words: str) -> dict[str, str]:
    name, colon, values = words.partition(":")
    before, arrow, after = values.partition("->")
    if not colon or not arrow or not name.strip():
        raise UsageProblem(f"--did {words}: expected `field: before -> after`")
    return {"field": name.strip(), "before": before.strip(), "after": after.strip()}


def _from_editor(run: str) -> str:
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if editor is None and not sys.stdin.isatty():
        raise UsageProblem("no text given and no terminal to ask on", 'chronicle note "what happened"')
    import tempfile  # brings `random` with it, and only an editor needs it

    with tempfile.TemporaryDirectory(prefix="chronicle-note-") as directory:
        path = Path(directory) / "NOTE.md"
        path.write_text(TEMPLATE.format(run=run), encoding="utf-8")
        try:
            done = subprocess.run([*shlex.split(editor or "vi"), str(path)], check=False)
        except OSError as problem:
            raise ChronicleError(f"cannot start the editor `{editor or 'vi'}`: {problem.strerror}") from problem
        if done.returncode != 0:
            raise ChronicleError(f"editor `{editor or 'vi'}` ended with code {done.returncode}: nothing written")
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))
