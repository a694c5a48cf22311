"""What the journal records about checkpoints: their paths, the launch that saved each, and the verdict of `verify`.

An entry of kind `verified` carries the checkpoint's stamp (`rollback.checkpoint.layout`): names, sizes, times and inodes of
its files. A verdict is valid while a checkpoint has that stamp, wherever a rollback moves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple

from chronicle.journal import Entry
from chronicle.journal.events import (
    CheckpointSaved as CheckpointSaved,
)
from chronicle.journal.events import (
    EntryKind,
    RollbackReceipt,
    UndoReceipt,
    Verified,
    events_of,
    read,
)
from chronicle.story.plain import format_when
from rollback.errors import RollbackError

if TYPE_CHECKING:
    from rollback.checkpoint.layout import Checkpoint
    from rollback.errors import Finding

__all__ = [
    "CheckpointVerdict",
    "describe_verdict",
    "find_checkpoint_roots",
    "find_verdict",
    "verdict_event",
    "with_launches",
]

MAX_ERRORS = 5  # kept in the entry; `chronicle verify` prints all of them again


class CheckpointVerdict(NamedTuple):
    """What a verification found. `full`: every byte was read. `errors` are (check, path, message) of the first few."""

    entry_id: str
    ts: str
    stamp: str
    full: bool
    passes: bool
    errors: tuple[tuple[str, str, str], ...] = ()

    @property
    def when(self) -> str:
        """Day and minute with the offset from UTC, for messages."""
        return format_when(self.ts)

    @property
    def sound(self) -> bool:
        """Whether every byte was read and nothing forbids resuming from it."""
        return self.full and self.passes


def verdict_event(checkpoint: Checkpoint, findings: Sequence[Finding], *, full: bool, stamp: str) -> Verified:
    """The entry that records what `chronicle verify` found."""
    errors = [finding for finding in findings if finding.severity.value == "error"]
    return Verified(
        path=str(checkpoint.path),
        stamp=stamp,
        full=full,
        passes=not errors,
        files=len(checkpoint.files),
        bytes=checkpoint.size_bytes,
        errors=tuple([error.check, error.path, error.message] for error in errors[:MAX_ERRORS]),
        num_errors=len(errors),
    )


def find_verdict(path: Path, entries: Iterable[Entry]) -> CheckpointVerdict | None:
    """The newest verdict that is valid for the checkpoint at `path`, or None."""
    verdicts: dict[str, CheckpointVerdict] = {}
    for entry, found in events_of(entries, Verified):
        if found.stamp:
            verdicts[found.stamp] = _stronger(verdicts.get(found.stamp), _verdict(entry, found))
    if not verdicts:
        return None
    from rollback.checkpoint.layout import stamp_of  # most commands have no checkpoint to look at

    try:
        return verdicts.get(stamp_of(path))
    except (RollbackError, OSError, ValueError):
        return None


def describe_verdict(verdict: CheckpointVerdict | None) -> str:
    """The verdict in a few words."""
    if verdict is None:
        return "not verified"
    if not verdict.passes:
        check, path, message = verdict.errors[0] if verdict.errors else ("", "", "see `chronicle verify`")
        return f"found unsound on {verdict.when}: {check} {path}: {message}"
    depth = "every byte read" if verdict.full else "names, structure and counters"
    return f"verified {verdict.when} ({depth})"


def _stronger(earlier: CheckpointVerdict | None, later: CheckpointVerdict) -> CheckpointVerdict:
    """The later verdict, except that a quick one that passes does not replace a full one of the same bytes."""
    if earlier is not None and earlier.full and not later.full and later.passes:
        return earlier
    return later


def _verdict(entry: Entry, found: Verified) -> CheckpointVerdict:
    kept = [row for row in found.errors if isinstance(row, list) and len(row) == 3]
    return CheckpointVerdict(
        entry_id=entry.id,
        ts=entry.ts,
        stamp=found.stamp,
        full=found.full,
        passes=found.passes,
        errors=tuple((str(check), str(path), str(message)) for check, path, message in kept),
    )


def find_checkpoint_roots(entries: Iterable[Entry], configured: Path | None, base: Path) -> tuple[Path, ...]:
    """Directories that hold this run's checkpoints: the configured one, else the parents of the recorded saves."""
    if configured is not None:
        return (configured,)
    parents: dict[Path, None] = {}
    for _, saved in events_of(entries, CheckpointSaved):
        if saved.path:
            path = Path(saved.path) if Path(saved.path).is_absolute() else base / saved.path
            parents[path.parent] = None
    return tuple(parents)


def with_launches(checkpoints: Iterable[Checkpoint], entries: Iterable[Entry]) -> list[Checkpoint]:
    """The checkpoints with the launch that saved each, taken from the journal where the manifest does not name it."""
    present: dict[str, int] = {}  # name in the root -> launch that saved it last
    abandoned: dict[tuple[str, str], int] = {}
    kinds = frozenset((EntryKind.CHECKPOINT, EntryKind.ROLLBACK_RECEIPT, EntryKind.UNDO_RECEIPT))
    for entry in entries:
        if entry.kind not in kinds:
            continue
        event = read(entry)
        if isinstance(event, CheckpointSaved) and entry.launch is not None and event.path:
            present[_name_in_root(event.path)] = entry.launch
        elif isinstance(event, RollbackReceipt | UndoReceipt):
            for name in event.abandoned:
                if name in present:
                    abandoned[str(event.intent), name] = present.pop(name)
        if isinstance(event, UndoReceipt):
            for name in event.returned:
                launch = abandoned.get((event.undoes_intent, name))
                if launch is not None:
                    present[name] = launch
    return [_with_launch(checkpoint, present, abandoned) for checkpoint in checkpoints]


def _with_launch(checkpoint: Checkpoint, present: dict[str, int], abandoned: dict[tuple[str, str], int]) -> Checkpoint:
    if checkpoint.launch is not None:
        return checkpoint
    name = checkpoint.path.name
    launch = present.get(name) if checkpoint.abandoned is None else abandoned.get((checkpoint.abandoned, name))
    return checkpoint if launch is None else replace(checkpoint, launch=launch)


def _name_in_root(path: str) -> str:
    """`…/opt_step-500/accelerator_state` and `…/opt_step-500` are the same checkpoint."""
    pure = PurePath(path)
    return pure.parent.name if pure.name == "accelerator_state" else pure.name
