"""What was done to a run outside its journal, and whether it can be taken back. The journal is the log of operations."""

from collections.abc import Sequence
from typing import NamedTuple

from chronicle.errors import ChronicleError
from chronicle.goback.opened import find_undoable
from chronicle.journal import Entry
from chronicle.journal.events import EntryKind, Hardware, Note, Restarted

UNDONE_BY_THEIR_VERB = (EntryKind.ROLLBACK_RECEIPT, EntryKind.QUARANTINE)
TAKEN_BACK = (EntryKind.UNDO_RECEIPT, EntryKind.QUARANTINE_UNDONE)
FINAL = {  # kinds that nothing takes back, and the way that there is instead
    EntryKind.UNDO_RECEIPT: "an undo is not undone: `chronicle rollback` makes the rollback again",
    EntryKind.RECOVER_RECEIPT: "it ended an interrupted transaction: the checkpoints are as before it or as planned",
    EntryKind.QUARANTINE_UNDONE: "`chronicle verify --quarantine` moves the strays again",
    EntryKind.PRUNE: "what was deleted does not come back",
    EntryKind.SWEEP: "processes that were ended do not come back",
    EntryKind.IMPORT: "imported points are part of the run: import the others as another run",
    EntryKind.RESTART: "a launch that has begun is not undone: `chronicle rollback` goes back to before it",
}


class Operation(NamedTuple):
    """One act that changed something outside the journal. `stands`: why it cannot be undone, or that it is; "" where it can."""

    entry: Entry
    stands: str

    @property
    def id(self) -> str:
        """The last eight letters, as everywhere."""
        return self.entry.id[-8:]

    @property
    def title(self) -> str:
        """What was done."""
        return self.entry.title or self.entry.kind


def list_operations(entries: Sequence[Entry]) -> list[Operation]:
    """Every act of the run that changed something outside its journal, in order of time."""
    backs = [one for one in entries if one.kind in TAKEN_BACK or is_mark(one)]
    done = {ref: entry for entry in backs for ref in entry.refs}
    last = find_undoable(entries)
    return [
        Operation(entry, _stands(entry, entries[place + 1 :], done.get(entry.id), last))
        for place, entry in enumerate(entries)
        if _is_act(entry)
    ]


def find_operation(entries: Sequence[Entry], wanted: str) -> Operation:
    """The operation of this id, or of its start or end."""
    name = wanted.upper()
    chosen = [one for one in list_operations(entries) if one.entry.id.endswith(name) or one.entry.id.startswith(name)]
    if len(chosen) == 1:
        return chosen[0]
    found = f"{len(chosen)} operations are called `{wanted}`: expected one"
    raise ChronicleError(found if chosen else f"no operation `{wanted}` in this run", "`chronicle undo --list` lists them")


def _is_act(entry: Entry) -> bool:
    if entry.kind == EntryKind.RESTART:
        return Restarted.of(entry).decision.startswith("again")
    if entry.kind == EntryKind.HARDWARE:
        return Hardware.of(entry).action is not None
    return is_mark(entry) or entry.kind in FINAL or entry.kind in UNDONE_BY_THEIR_VERB


def is_mark(entry: Entry) -> bool:
    """Whether it is the note that `chronicle runs --add-tag`, `--archive` or an opposite writes; a person's has other words."""
    if entry.kind != EntryKind.NOTE:
        return False
    note = Note.of(entry)
    tagged = bool(note.tags) and entry.title == ", ".join(f"tag {tag}" for tag in note.tags)
    return tagged or note.archived is not None or bool(note.untags)


def _stands(entry: Entry, later: Sequence[Entry], taken_back: Entry | None, last: Entry | None) -> str:
    """Why this act cannot be undone; "" where it can."""
    if taken_back is not None:
        return f"undone by {taken_back.id[-8:]}"
    if entry.kind in FINAL:
        return FINAL[EntryKind(entry.kind)]
    if entry.kind == EntryKind.ROLLBACK_RECEIPT and last is not None and last.id != entry.id:
        return f"rollback {last.id[-8:]} was made after it: undo that first"
    if entry.kind == EntryKind.HARDWARE:
        said = Hardware.of(entry)
        opposite = [Hardware.of(one) for one in later if one.kind == EntryKind.HARDWARE]
        if any(one.host == said.host and one.action not in (None, said.action) for one in opposite):
            return "undone: the node was excluded or readmitted again later"
    return ""
