"""Digests that seal what a launch wrote: rotated logs, the logs at exit, and the ranks' evidence files.

A seal is {path below the run, bytes, sha256}. `verify_seals` hashes the files again: a log that was edited or cut later no
longer matches its seal in the journal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from chronicle.journal import Entry
from chronicle.paths import RunPaths

__all__ = ["seal_file", "verify_seals"]

BLOCK_BYTES = 1 << 20


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
