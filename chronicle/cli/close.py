"""`chronicle close ID`: what came of it. An incident or a rollback stays open in `status` until someone says."""

from enum import StrEnum
from typing import Annotated, Any

import typer

from chronicle.cli.completion import complete_entries
from chronicle.cli.existing import need_run
from chronicle.cli.options import JsonOption, LogsOption, RunOption, settings_from
from chronicle.cli.result import CommandResult
from chronicle.errors import UsageProblem
from chronicle.journal import JournalWriter, read_journal
from chronicle.story import Story, read_story
from chronicle.story.plain import plain

__all__ = ["Outcome", "close"]


class Outcome(StrEnum):
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
    outcome: Annotated[Outcome | None, typer.Option(help="What came of it.", show_default=False)] = None,
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
            "no outcome given, nothing written: expected --outcome " + "|".join(o.value for o in Outcome),
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
