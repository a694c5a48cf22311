"""Digests that seal what a launch wrote: rotated logs, the logs at exit, and the ranks' evidence files.

A seal is {path below the run, bytes, sha256}. `verify_seals` hashes the files again: a log that was edited or cut later no
longer matches its seal in the journal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from chronicle.journal import Entry
from chronicle.launch.record import LaunchRecord
from chronicle.paths import RunPaths

__all__ = ["LaunchSeals", "seal_file", "verify_seals"]

BLOCK_BYTES = 1 << 20
SEALED = ("*.log", "evidence/*.jsonl", "metrics.jsonl", "samples.jsonl")


class LaunchSeals:
    """The seals of one launch's files: rotated parts at once, the rest at its end."""

    def __init__(self, paths: RunPaths, number: int, record: LaunchRecord) -> None:
        self._paths, self._number, self._record = paths, number, record
        self._parts: dict[Path, dict[str, Any]] = {}

    def seal_part(self, part: Path) -> None:
        """A log was rotated: its digest goes into the journal now, not when the launch ends."""
        seal = seal_file(self._paths, part)
        if seal is not None:
            self._parts[part] = seal
            self._record.append("evidence", title=f"log part {part.name} sealed", data={"sealed": [seal]})

    def seal_all(self, is_ours: Callable[[Path], bool]) -> list[dict[str, Any]]:
        """Digests of everything this launch wrote, rotated parts included; other nodes' files are theirs to seal."""
        directory = self._paths.launch_dir(self._number)
        files = sorted(path for pattern in SEALED for path in directory.glob(pattern) if is_ours(path))
        seals = (self._parts.get(path) or seal_file(self._paths, path) for path in files)
        return [seal for seal in seals if seal is not None]


def seal_file(paths: RunPaths, path: Path) -> dict[str, Any] | None:
    """The seal of a file as it is now; None when it cannot be read."""
    digest = hashlib.sha256()
    size = 0
    try:
        with open(path, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                size += len(block)
    except OSError:
        return None
    return {"path": path.relative_to(paths.run_dir).as_posix(), "bytes": size, "sha256": digest.hexdigest()}


def verify_seals(paths: RunPaths, entries: Iterable[Entry]) -> list[str]:
    """One sentence per sealed file that is gone or no longer what was sealed; an empty list when all is well."""
    problems = []
    for entry in entries:
        for seal in entry.data.get("sealed", ()) if entry.kind in ("launch.end", "evidence") else ():
            problem = _check(paths, seal)
            if problem:
                problems.append(f"{problem} (sealed by {entry.kind} {entry.id})")
    return problems


def _check(paths: RunPaths, seal: Mapping[str, Any]) -> str | None:
    now = seal_file(paths, paths.run_dir / str(seal["path"]))
    if now is None:
        return f"`{seal['path']}` cannot be read"
    if now["sha256"] != seal["sha256"]:
        return f"`{seal['path']}` has changed: {seal['bytes']:,} bytes when sealed, {now['bytes']:,} now"
    return None
