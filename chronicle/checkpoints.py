"""What `chronicle verify` found, as the journal remembers it: it holds as long as no file of the checkpoint has changed.

Entries of kind `verified` carry the checkpoint's stamp (`rollback.checkpoint.layout`), so that a checkpoint is known again wherever a
rollback has moved it, and a verdict on files that are not the same any more is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chronicle.journal import Entry
from rollback.errors import RollbackError

if TYPE_CHECKING:
    from rollback.checkpoint.layout import Checkpoint
    from rollback.findings import Finding

__all__ = ["VERIFIED", "CheckpointVerdict", "describe_verdict", "find_verdict", "verdict_data"]

VERIFIED = "verified"
MAX_ERRORS = 5  # kept in the entry; `chronicle verify` says them all again


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointVerdict:
    """What a verification found. `full`: every byte was read. `errors` are (check, path, message) of the first few."""

    entry_id: str
    ts: str
    stamp: str
    full: bool
    passes: bool
    errors: tuple[tuple[str, str, str], ...] = ()

    @property
    def when(self) -> str:
        """The day and minute, as a person writes them (UTC)."""
        return self.ts[:16].replace("T", " ")

    @property
    def sound(self) -> bool:
        """Whether every byte was read and nothing forbids resuming from it."""
        return self.full and self.passes


def verdict_data(checkpoint: Checkpoint, findings: Sequence[Finding], *, full: bool, stamp: str) -> dict[str, Any]:
    """The `data` of the entry for what `chronicle verify` found."""
    errors = [finding for finding in findings if finding.severity.value == "error"]
    return {
        "path": str(checkpoint.path),
        "stamp": stamp,
        "full": full,
        "passes": not errors,
        "files": len(checkpoint.files),
        "bytes": checkpoint.size_bytes,
        "errors": [[error.check, error.path, error.message] for error in errors[:MAX_ERRORS]],
        "num_errors": len(errors),
    }


def find_verdict(path: Path, entries: Iterable[Entry]) -> CheckpointVerdict | None:
    """The newest verdict that still holds for the checkpoint at `path`; None when there is none or nothing is there."""
    verdicts: dict[str, CheckpointVerdict] = {}
    for entry in entries:
        if entry.kind == VERIFIED and (verdict := _verdict(entry)) is not None:
            verdicts[verdict.stamp] = _stronger(verdicts.get(verdict.stamp), verdict)
    if not verdicts:
        return None
    from rollback.checkpoint.layout import (
        stamp_of,  # looks at checkpoints; most readers of a journal have none to look at
    )

    try:
        return verdicts.get(stamp_of(path))
    except (RollbackError, OSError, ValueError):
        return None


def describe_verdict(verdict: CheckpointVerdict | None) -> str:
    """A few words for a person."""
    if verdict is None:
        return "not verified"
    if not verdict.passes:
        check, path, message = verdict.errors[0] if verdict.errors else ("", "", "see `chronicle verify`")
        return f"found unsound on {verdict.when}: {check} {path}: {message}"
    depth = "every byte read" if verdict.full else "names, structure and counters"
    return f"verified {verdict.when} ({depth})"


def _stronger(earlier: CheckpointVerdict | None, later: CheckpointVerdict) -> CheckpointVerdict:
    """A quick look that passes takes nothing back from a full one of the same bytes."""
    if earlier is not None and earlier.full and not later.full and later.passes:
        return earlier
    return later


def _verdict(entry: Entry) -> CheckpointVerdict | None:
    data: Mapping[str, Any] = entry.data
    stamp, errors = data.get("stamp"), data.get("errors")
    if not isinstance(stamp, str):
        return None
    rows = errors if isinstance(errors, list) else []
    kept = tuple((str(row[0]), str(row[1]), str(row[2])) for row in rows if isinstance(row, list) and len(row) == 3)
    return CheckpointVerdict(
        entry_id=entry.id,
        ts=entry.ts,
        stamp=stamp,
        full=data.get("full") is True,
        passes=data.get("passes") is True,
        errors=kept,
    )
