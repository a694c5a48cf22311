"""What `chronicle verify` found goes into the journal of the run whose checkpoints it looked at: the recording half of it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from chronicle.errors import ChronicleError, JournalError
from chronicle.journal import Entry, JournalWriter, read_journal
from chronicle.cli.history import with_launches
from chronicle.settings import Settings
from chronicle.verified import KIND, find_verdict, verdict_data
from chronicle.watch.facts import find_checkpoint_roots
from rollback.errors import RollbackError
from rollback.findings import Finding
from rollback.checkpoint.layout import ACCELERATE_STATE_DIR, Checkpoint
from rollback.checkpoint.stamp import stamp_of

__all__ = ["remember", "stamp_or_none"]

Looked = tuple[Checkpoint, str | None, Sequence[Finding]]  # the stamp is the one from before it was read


def stamp_or_none(path: Path) -> str | None:
    """The stamp of a checkpoint, None where it cannot be taken: then nothing is remembered of it."""
    try:
        return stamp_of(path)
    except (RollbackError, OSError, ValueError):
        return None


def remember(settings: Settings, looked: Sequence[Looked], *, full: bool) -> tuple[str, ...]:
    """Append one entry for each checkpoint of this run whose verdict is new; returns what is to be said about it.

    Outside a run, and for checkpoints that are not this run's, nothing is written. A journal that cannot be written is
    said, and changes nothing about what was found.
    """
    if not settings.paths.journal_dir.is_dir():
        return ()
    try:
        entries = read_journal(settings.paths).entries
    except ChronicleError as problem:
        return (f"not recorded: {problem.message}",)
    roots = {
        Path(os.path.abspath(root)) for root in find_checkpoint_roots(entries, settings.checkpoints_dir, Path.cwd())
    }
    launches = {c.path: c.launch for c in with_launches([c for c, _, _ in looked], entries)}
    changed, writer = [], JournalWriter(settings.paths)
    try:
        for checkpoint, stamp, findings in looked:
            if not _is_below(checkpoint, roots):
                continue
            if stamp is None or stamp_or_none(checkpoint.path) != stamp:
                changed.append(checkpoint.path.name)
                continue
            data = verdict_data(checkpoint, findings, full=full, stamp=stamp)
            if not _is_known(checkpoint.path, data, entries):
                title = f"{checkpoint.path.name} {_words(data)}"
                writer.append(KIND, step=checkpoint.step, launch=launches[checkpoint.path], title=title, data=data)
    except JournalError as problem:
        return (f"not recorded: {problem.message}",)
    finally:
        writer.close()
    return (f"not recorded, files changed while they were read: {', '.join(changed)}",) if changed else ()


def _is_below(checkpoint: Checkpoint, roots: set[Path]) -> bool:
    path = Path(os.path.abspath(checkpoint.path))
    path = path.parent if path.name == ACCELERATE_STATE_DIR else path
    if checkpoint.abandoned is not None:
        return any(path.parents[2] == root.parent for root in roots)
    return path.parent in roots


def _is_known(path: Path, data: Mapping[str, object], entries: Sequence[Entry]) -> bool:
    """Whether the journal says just this already, or more: then another entry would add nothing."""
    verdict = find_verdict(path, entries)
    if verdict is None or verdict.passes != data["passes"]:
        return False
    if not verdict.passes and verdict.full == data["full"]:
        errors = data["errors"]
        return isinstance(errors, list) and [list(error) for error in verdict.errors] == errors
    return verdict.full or not data["full"]


def _words(data: Mapping[str, object]) -> str:
    if not data["passes"]:
        return f"does not pass: {data['num_errors']} errors"
    return "verified: every byte was read" if data["full"] else "verified: names, structure and counters"
