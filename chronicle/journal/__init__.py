"""The journal of a run: an append-only, hash-chained list of entries, and what is computed from them.

One JSONL file per writer, without locks; journals are merged by copying files together (`docs/design.md` §5.1). The kinds of
entries are in `chronicle.journal.events`. Nothing here reads checkpoints. Names are imported on first use, because
`chronicle note` needs the writer alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from chronicle.journal.entries import Entry

if TYPE_CHECKING:
    from chronicle.journal.lineage import Interval, LaunchSpan, Lineage, RollbackMark, compute_lineage
    from chronicle.journal.reader import Journal, JournalProblem, read_journal
    from chronicle.journal.writer import JournalWriter

__all__ = [
    "Entry",
    "Interval",
    "Journal",
    "JournalProblem",
    "JournalWriter",
    "LaunchSpan",
    "Lineage",
    "RollbackMark",
    "compute_lineage",
    "read_journal",
]

HOMES = {
    **dict.fromkeys(("Interval", "LaunchSpan", "Lineage", "RollbackMark", "compute_lineage"), "chronicle.journal.lineage"),
    **dict.fromkeys(("Journal", "JournalProblem", "read_journal"), "chronicle.journal.reader"),
    "JournalWriter": "chronicle.journal.writer",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)
