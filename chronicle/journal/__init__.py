"""The journal of a run: an append-only, hash-chained list of entries, and what is computed from them.

One JSONL file per writer, without locks; journals are merged by copying files together (`docs/design.md` §5.1). The kinds of
entries are in `chronicle.journal.events`. Nothing here reads checkpoints. The lineage is imported on first use, because
`chronicle note` does not need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from chronicle.journal.entries import Entry
from chronicle.journal.reader import Journal, JournalProblem, read_journal
from chronicle.journal.writer import JournalWriter

if TYPE_CHECKING:
    from chronicle.journal.lineage import Interval, LaunchSpan, Lineage, RollbackMark, compute_lineage

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

LINEAGE = "chronicle.journal.lineage"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(LINEAGE), name)
