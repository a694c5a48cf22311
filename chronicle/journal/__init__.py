"""The append-only, hash-chained journal of one run: entries, their writer and reader, and pure views over them.

One JSONL file per writer, no locks, merged by copying files together (`docs/design.md` §5.1). Nothing here knows
checkpoints, the command line or a trainer. The lineage is loaded on first use: `chronicle note` needs none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from chronicle.journal.entries import Entry
from chronicle.journal.reader import Journal, Problem, read_journal
from chronicle.journal.writer import JournalWriter

if TYPE_CHECKING:
    from chronicle.journal.lineage import Interval, LaunchSpan, Lineage, RollbackMark, compute_lineage

__all__ = [
    "Entry",
    "Interval",
    "Journal",
    "JournalWriter",
    "LaunchSpan",
    "Lineage",
    "Problem",
    "RollbackMark",
    "compute_lineage",
    "read_journal",
]

LINEAGE = "chronicle.journal.lineage"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(LINEAGE), name)
