"""Files attached to entries: they go into the run's object store, an entry holds their record of evidence."""

from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError, JournalError
from chronicle.paths import RunPaths
from rollback.disk.objects import ObjectStore, sha256_of
from rollback.errors import UnreadableFile

__all__ = ["object_path", "store_file"]


def object_path(paths: RunPaths, sha256: str) -> Path:
    """The path of the object with this digest."""
    return ObjectStore(paths.objects_dir).path(sha256)


def store_file(paths: RunPaths, source: Path) -> dict[str, Any]:
    """Copy a file into the store; returns its evidence record (`path`, `sha256`, `bytes`)."""
    if not source.is_file():
        raise ChronicleError(f"cannot attach `{source}`: not a readable file")
    try:
        digest = sha256_of(source)
        store = ObjectStore(paths.objects_dir)
        store.add_file(source, digest)
        size = store.path(digest).stat().st_size
    except UnreadableFile as problem:
        raise JournalError(problem.message, problem.remedy) from problem
    except OSError as problem:
        raise JournalError(f"cannot store `{source}` in `{paths.objects_dir}`: {problem.strerror}") from problem
    return {"kind": "file", "path": source.name, "sha256": digest, "bytes": size}
