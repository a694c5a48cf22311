"""The outcome of an incident, a rollback or a note, for `chronicle note --close`."""

from typing import TYPE_CHECKING

from chronicle.cli.options import CommandResult
from chronicle.errors import UsageProblem
from chronicle.journal.events import Close, EntryKind, Words
from chronicle.journal.events import read as read_event
from chronicle.journal.reader import read_journal
from chronicle.journal.writer import JournalWriter
from chronicle.settings import Settings
from chronicle.story.plain import plain

if TYPE_CHECKING:
    from chronicle.story import Story


ONLY_OPEN = "open"  # no id ends like this: their alphabet has no O
NOT_CLOSABLE = frozenset(
    (
        *(EntryKind.CLOSE, EntryKind.AMEND, EntryKind.RUN_INIT, EntryKind.CHECKPOINT),
        *(EntryKind.LAUNCH_START, EntryKind.LAUNCH_STEP, EntryKind.LAUNCH_END),
    )
)


def close_entry(settings: Settings, entry_id: str, text: str | None, outcome: str, rule: str | None) -> CommandResult:
    """Write the outcome of this entry; `open` names the only one that is open."""
    from chronicle.story import read_story

    journal = read_journal(settings.paths)
    story = read_story(settings.paths, journal=journal)
    entry = journal.find(_only_open(story) if entry_id == ONLY_OPEN else entry_id)
    if entry.kind in NOT_CLOSABLE:
        message = f"entry {plain(entry.id)} is a `{plain(entry.kind)}`: it has no outcome"
        raise UsageProblem(message, "`chronicle status` lists what is open")
    event = Close.from_json({"outcome": outcome} | {k: v for k, v in (("text", text), ("rule", rule)) if v})
    closed = read_event(entry)
    expected = closed.expect if isinstance(closed, Words) else None
    with JournalWriter(settings.paths) as writer:
        title = f"{outcome}: {entry.title}"[:200]
        written = writer.write(event, step=story.headline.step or None, title=title, refs=(entry.id,))
    talk = (f"expected: {plain(expected)}",) if expected else ()
    result = {"id": written.id, "closes": entry.id, "outcome": outcome, "run": settings.run}
    return CommandResult(text=f"{written.id}  {plain(written.title)}", data=result, talk=talk)


def _only_open(story: "Story") -> str:
    ids = story.open_ids
    if len(ids) == 1:
        return ids[0]
    listed = ": " + ", ".join(entry_id[-8:] for entry_id in ids) if ids else ""
    raise UsageProblem(f"{len(ids)} entries are open{listed}: `open` expects one", "name it: chronicle note --close ID …")
