"""Attachments in the run's content-addressed store `objects/<aa>/<sha256>`: written once, never changed."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError, JournalError
from chronicle.paths import RunPaths

__all__ = ["object_path", "store_file"]

CHUNK_BYTES = 1 << 20


def object_path(paths: RunPaths, sha256: str) -> Path:
    """Where the object with this digest lies."""
    return paths.objects_dir / sha256[:2] / sha256


def store_file(paths: RunPaths, source: Path) -> dict[str, Any]:
    """Copy a file into the store; returns its evidence record (`path`, `sha256`, `bytes`)."""
    if not source.is_file():
        raise ChronicleError(f"cannot attach `{source}`: not a readable file")
    try:
        digest, size = _digest(source)
        target = object_path(paths, digest)
        if not target.exists():
            _copy_durably(source, target)
    except OSError as problem:
        raise JournalError(f"cannot store `{source}` in `{paths.objects_dir}`: {problem.strerror}") from problem
    return {"kind": "file", "path": source.name, "sha256": digest, "bytes": size}


def _digest(source: Path) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with source.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


def _copy_durably(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with source.open("rb") as reader, temporary.open("xb") as writer:
            shutil.copyfileobj(reader, writer, CHUNK_BYTES)
            writer.flush()
            os.fsync(writer.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
