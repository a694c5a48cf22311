"""The append-only, hash-chained journal of one run: entries, their writer and reader, and pure views over them.

One JSONL file per writer, no locks, merged by copying files together (`docs/design.md` §5.1). Nothing here knows
checkpoints, the command line or a trainer.
"""

from chronicle.journal.entries import Entry
from chronicle.journal.lineage import Interval, LaunchSpan, Lineage, RollbackMark, compute_lineage
from chronicle.journal.reader import Journal, Problem, read_journal
from chronicle.journal.writer import JournalWriter

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
