"""The run's content-addressed object store, `objects/<aa>/<sha256>`: originals of edited files, attachments, plans."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from rollback.disk.durable import REAL_DISK, Disk
from rollback.errors import UnreadableFile

_CHUNK_BYTES = 1 << 20


def sha256_of(path: Path) -> str:
    """SHA-256 of a file as lower-case hex, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """Files below `directory`, named by the SHA-256 of their bytes. Each is written once, atomically and durably."""

    directory: Path
    disk: Disk = REAL_DISK

    def path(self, sha256: str) -> Path:
        """The path of the object with this digest, whether it exists or not."""
        return self.directory / sha256[:2] / sha256

    def add_file(self, source: Path, sha256: str) -> None:
        """Store the bytes of `source`, whose digest is `sha256`; `UnreadableFile` when they changed meanwhile."""
        target = self.path(sha256)
        if self._holds(target, sha256):
            return
        temporary = self._temporary(target)
        self.disk.copy_new(source, temporary)
        self._publish(temporary, target, sha256)

    def add_bytes(self, content: bytes) -> str:
        """Store `content`; returns its digest."""
        sha256 = hashlib.sha256(content).hexdigest()
        target = self.path(sha256)
        if not self._holds(target, sha256):
            temporary = self._temporary(target)
            self.disk.write_new(temporary, content)
            self._publish(temporary, target, sha256)
        return sha256

    def find(self, sha256: str) -> Path:
        """The path of an object that exists and has its digest; raises `UnreadableFile` otherwise."""
        target = self.path(sha256)
        if not target.is_file():
            raise UnreadableFile(
                f"the original file {sha256[:12]}… is not in `{self.directory}`", remedy="restore that directory"
            )
        if sha256_of(target) != sha256:
            raise UnreadableFile(
                f"`{target}` was changed: its bytes no longer have the digest in its name",
                remedy="restore it from a copy",
            )
        return target

    def _holds(self, target: Path, sha256: str) -> bool:
        return target.is_file() and sha256_of(target) == sha256

    def _temporary(self, target: Path) -> Path:
        self.disk.make_directory(target.parent)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        self.disk.remove_tree(temporary)
        return temporary

    def _publish(self, temporary: Path, target: Path, sha256: str) -> None:
        if sha256_of(temporary) != sha256:
            self.disk.unlink(temporary)
            raise UnreadableFile(
                f"the file kept as {sha256[:12]}… changed while it was read",
                remedy="stop the run that writes it, then repeat the command",
            )
        self.disk.replace(temporary, target)
        self.disk.sync_directory(target.parent)
