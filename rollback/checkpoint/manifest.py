"""`chronicle-manifest.json`: the complete inventory of a checkpoint, written into its directory after all other files.

It lists the files with sizes and digests, and what the training process had in memory when it saved (`memory`, filled
by the guard). Version 1; another version is refused. A manifest whose digests are "pending" has names and sizes only.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from rollback.checkpoint.layout import MAX_ENTRIES, DirectoryEntry, FileType, scan_entries
from rollback.disk.content import open_bounded, read_part
from rollback.disk.durable import write_atomic
from rollback.errors import UnreadableFile
from rollback.files.json_file import JsonPart, json_parts, put_part

MANIFEST_NAME = "chronicle-manifest.json"
VERSION = 1
BY_HAND = "by hand"  # `made` of a manifest that `chronicle verify --write` wrote: an inventory, no witness of a save
_CHUNK_BYTES = 4 * 2**20
_MAX_MANIFEST_BYTES = 48 * 2**20
_MAX_MEMORY_BYTES = 32 * 2**20  # of everything except the list of files
_WRITE_ANEW = "if the checkpoint is as you want it, write a new manifest with `chronicle verify --write`"


class OtherVersion(UnreadableFile):
    """An intact manifest of a version that this program does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    """One file as it was written: relative posix path, size, SHA-256 and CRC-32 in hex, None while pending."""

    path: str
    size_bytes: int
    sha256: str | None = None
    crc32: str | None = None

    def to_json(self) -> dict[str, object]:
        """The file as a JSON object."""
        return {"path": self.path, "size": self.size_bytes, "sha256": self.sha256, "crc32": self.crc32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The inventory; `memory` is what the guard recorded at save, None when no guard was attached."""

    step: int | None
    files: tuple[ManifestFile, ...]
    digests: str
    memory: Mapping[str, object] | None = None
    run: str | None = None
    launch: int | None = None
    more: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """The manifest as a JSON object, `more` included."""
        return {
            "v": VERSION,
            "step": self.step,
            "run": self.run,
            "launch": self.launch,
            "digests": self.digests,
            "files": [file.to_json() for file in self.files],
            "memory": self.memory,
            **self.more,
        }

    @property
    def written(self) -> frozenset[str] | None:
        """The files that the save wrote; None when the manifest was made later, by hand, and can only say what was there."""
        by_save = self.memory is not None and self.more.get("made") != BY_HAND
        return frozenset(file.path for file in self.files) if by_save else None

    def find(self, path: str) -> ManifestFile | None:
        """The file of that relative path, or None."""
        return next((file for file in self.files if file.path == path), None)


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest in `directory`, None when there is none; UnreadableFile when it is damaged or of another version."""
    path = directory / MANIFEST_NAME
    try:
        with open_bounded(path, _MAX_MANIFEST_BYTES) as (fd, size_bytes):
            return _manifest(json_parts(fd, 0, size_bytes), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        raise UnreadableFile(f"`{path}` cannot be read: {problem.strerror}") from None
    except UnreadableFile as problem:
        if str(path) in problem.message:
            raise
        raise UnreadableFile(f"`{path}`: {problem.message}", _WRITE_ANEW) from None


def _manifest(parts: Iterable[JsonPart], where: str) -> Manifest:
    """Put together from its JSON, the files one by one; UnreadableFile names what is wrong and where."""
    files: list[ManifestFile] | None = None
    found: dict[str | int, Any] = {}
    left = _MAX_MEMORY_BYTES
    for part in parts:
        if not part.keys or isinstance(part.keys[0], int):
            raise UnreadableFile(f"`{where}` is not a JSON object", _WRITE_ANEW)
        if part.keys[0] == "files":
            files = files or []
            files += _listed_files(part, where)
            if len(files) > MAX_ENTRIES:
                raise UnreadableFile(
                    f"`{where}` lists more than {MAX_ENTRIES} files: that is not a plausible checkpoint", _WRITE_ANEW
                )
            continue
        left -= part.num_bytes
        if left < 0:
            raise UnreadableFile(f"`{where}` would take more than {_MAX_MEMORY_BYTES >> 20} MB of memory", _WRITE_ANEW)
        put_part(found, part)
    if found.get("v") != VERSION:
        raise OtherVersion(
            f"`{where}` has version {found.get('v')!r}: version {VERSION} is known", "use a newer chronicle"
        )
    if files is None:
        raise UnreadableFile(f"`{where}` has no list of files", _WRITE_ANEW)
    if found.get("memory") is not None and not _is_memory(found["memory"]):
        raise UnreadableFile(f"`{where}`: `memory` does not have the structure that the guard records", _WRITE_ANEW)
    known = {"v", "step", "files", "digests", "memory", "run", "launch"}
    step, memory, launch = found.get("step"), found.get("memory"), found.get("launch")
    return Manifest(
        step=step if is_count(step) else None,
        files=tuple(files),
        digests=str(found.get("digests", "pending")),
        memory=memory if isinstance(memory, dict) else None,
        run=found["run"] if isinstance(found.get("run"), str) else None,
        launch=launch if is_count(launch) else None,
        more={str(key): value for key, value in found.items() if key not in known},
    )


def _listed_files(part: JsonPart, where: str) -> Iterator[ManifestFile]:
    """The files in one part of the list; a short list is one part."""
    try:
        if len(part.keys) > 2 or not (len(part.keys) == 2 or isinstance(part.value, list)):
            raise TypeError("expected a list of objects")
        for record in [part.value] if len(part.keys) == 2 else part.value:
            yield _listed_file(record)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise UnreadableFile(f"`{where}`: its list of files cannot be read ({problem!r})", _WRITE_ANEW) from None


def _listed_file(record: Mapping[str, object]) -> ManifestFile:
    path, size, sha256, crc32 = record["path"], record["size"], record.get("sha256"), record.get("crc32")
    if not isinstance(path, str) or not is_count(size):
        raise ValueError(f"{str(path)[:80]!r} of {str(size)[:40]} bytes")
    if not isinstance(sha256, str | None) or not isinstance(crc32, str | None):
        raise ValueError(f"digests of {path[:80]!r}: expected text")
    return ManifestFile(path=path, size_bytes=size, sha256=sha256, crc32=crc32)


def is_count(value: object) -> TypeGuard[int]:
    """Whether this is an int from 0 to 2**63 - 1, as numbers of bytes, steps and launches are."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_memory(memory: object) -> bool:
    """Whether groups, schedulers and LRs have the structure that the guard records."""
    if not isinstance(memory, dict):
        return False
    groups, schedulers, rows = memory.get("groups"), memory.get("schedulers"), memory.get("next_lrs")
    fields = ("lr", "initial_lr", "max_lr", "min_lr")
    return (
        _is_list(groups, lambda group: isinstance(group, dict) and all(_is_lr(group.get(name)) for name in fields))
        and _is_list(schedulers, lambda one: isinstance(one, dict) and _is_list(one.get("last_lr"), _is_lr))
        and _is_list(rows, lambda row: isinstance(row, list) and _is_list(row, _is_lr))
    )


def _is_list(value: object, each: Callable[[object], bool]) -> bool:
    return value is None or (isinstance(value, list) and all(map(each, value)))


def _is_lr(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) < 2**1000)


def write_manifest(
    directory: Path,
    *,
    step: int | None,
    memory: Mapping[str, object] | None = None,
    run: str | None = None,
    launch: int | None = None,
    digests: bool = True,
    more: Mapping[str, object] | None = None,
    without: Collection[str] = (),
) -> Manifest:
    """List every file below `directory`, `without` those named, and write the manifest atomically and durably."""
    files: list[ManifestFile] = []
    for entry in (one for one in listed_entries(directory) if str(one.path) not in without):
        sha256, crc32 = digest_file(directory / entry.path) if digests else (None, None)
        files.append(ManifestFile(path=entry.path, size_bytes=entry.size_bytes, sha256=sha256, crc32=crc32))
    manifest = Manifest(
        step=step,
        files=tuple(files),
        digests="complete" if digests else "pending",
        memory=memory,
        run=run,
        launch=launch,
        more=more or {},
    )
    replace_manifest(directory, manifest)
    return manifest


def replace_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `manifest` into `directory`, replacing an existing one atomically and durably."""
    text = json.dumps(manifest.to_json(), indent=1, allow_nan=False, default=float) + "\n"
    write_atomic(directory / MANIFEST_NAME, text)


def listed_entries(directory: Path) -> tuple[DirectoryEntry, ...]:
    """The entries that a manifest lists: files and links, without manifests."""
    return tuple(
        entry
        for entry in scan_entries(directory)
        if entry.kind in (FileType.FILE, FileType.LINK) and not is_manifest_name(entry.name)
    )


def is_manifest_name(name: str) -> bool:
    """Whether a file is a manifest, or the temporary file of one."""
    return name == MANIFEST_NAME or name.startswith(f".{MANIFEST_NAME}.")


def digest_file(path: Path) -> tuple[str, str]:
    """(SHA-256, CRC-32) of a file in hex, read once in chunks."""
    import hashlib  # 5 ms that no one else here needs

    sha, crc = hashlib.sha256(), 0
    view = memoryview(bytearray(_CHUNK_BYTES))
    try:
        with open_bounded(path, sys.maxsize) as (fd, _):  # a link may lead to a pipe or a device, on which a read never ends
            at = 0
            while part := read_part(fd, view, at):
                sha.update(part)
                crc = zlib.crc32(part, crc)
                at += len(part)
    except OSError as problem:
        raise UnreadableFile(f"`{path}` cannot be read: {problem.strerror}") from None
    return sha.hexdigest(), f"{crc:08x}"
