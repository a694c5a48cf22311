"""`chronicle close` records the outcome of an incident, a rollback or a note."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from chronicle.cli.completion import complete_entries
from chronicle.cli.options import IN_RUN, CommandResult, InRun
from chronicle.errors import UsageProblem
from chronicle.journal.events import Close, EntryKind, Words
from chronicle.journal.events import read as read_event
from chronicle.journal.reader import read_journal
from chronicle.journal.writer import JournalWriter
from chronicle.story.plain import plain

if TYPE_CHECKING:
    from chronicle.story import Story


class CloseOutcome(StrEnum):
    """The outcome of an intervention."""

    WORKED = "worked"
    FAILED = "failed"
    PARTLY = "partly"
    INTERRUPTED = "interrupted"
    INCONCLUSIVE = "inconclusive"
    SUPERSEDED = "superseded"


ONLY_OPEN = "open"  # no id ends like this: their alphabet has no O
NOT_CLOSABLE = frozenset(
    (
        *(EntryKind.CLOSE, EntryKind.AMEND, EntryKind.RUN_INIT, EntryKind.CHECKPOINT),
        *(EntryKind.LAUNCH_START, EntryKind.LAUNCH_STEP, EntryKind.LAUNCH_END),
    )
)


def close(
    entry_id: Annotated[
        str,
        Argument(
            help="Entry to close; `open` for the only one that is open.",
            metavar="ID",
            autocompletion=complete_entries,
        ),
    ],
    text: str | None = None,
    outcome: CloseOutcome | None = None,
    rule: str | None = None,
    at: InRun = IN_RUN,
) -> CommandResult:
    """Record the outcome of an incident, a rollback or a note.

    Example: chronicle close 7Q2K9XAB --outcome worked "no spike for 3000 steps"

    Options:
      TEXT: The outcome in words.
      --outcome: The outcome.
      --rule: Rule learnt from it; the report collects them.
    """
    if outcome is None:
        raise UsageProblem(
            "no outcome given: expected --outcome " + "|".join(o.value for o in CloseOutcome),
            f'chronicle close {entry_id} --outcome worked "…"',
        )
    settings = at.existing()
    from chronicle.story import read_story

    journal = read_journal(settings.paths)
    story = read_story(settings.paths, journal=journal)
    entry = journal.find(_only_open(story) if entry_id == ONLY_OPEN else entry_id)
    if entry.kind in NOT_CLOSABLE:
        message = f"entry {plain(entry.id)} is a `{plain(entry.kind)}`: it has no outcome"
        raise UsageProblem(message, "`chronicle status` lists what is open")
    event = Close.from_json({"outcome": outcome.value} | {k: v for k, v in (("text", text), ("rule", rule)) if v})
    closed = read_event(entry)
    expected = closed.expect if isinstance(closed, Words) else None
    with JournalWriter(settings.paths) as writer:
        title = f"{outcome.value}: {entry.title}"[:200]
        written = writer.write(event, step=story.headline.step or None, title=title, refs=(entry.id,))
    talk = (f"expected: {plain(expected)}",) if expected else ()
    result = {"id": written.id, "closes": entry.id, "outcome": outcome.value, "run": settings.run}
    return CommandResult(text=f"{written.id}  {plain(written.title)}", data=result, talk=talk)


def _only_open(story: "Story") -> str:
    ids = story.open_ids
    if len(ids) == 1:
        return ids[0]
    listed = ": " + ", ".join(entry_id[-8:] for entry_id in ids) if ids else ""
    raise UsageProblem(f"{len(ids)} entries are open{listed}: `open` expects one", "name it: chronicle close ID …")
