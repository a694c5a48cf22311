"""`chronicle-manifest.json`: the closed inventory of a checkpoint, written into its directory, last.

It names every file with size and digests, and repeats what the training process had in memory when it saved
(`memory`, filled by the guard). Version 1; another version is refused by name. A manifest without digests says
"pending": sizes and names are still closed.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from rollback.bounded_read import read_bounded
from rollback.checksums import ChecksumTarget, Progress, wrong_checksums
from rollback.errors import UnreadableFile
from rollback.findings import Finding, Severity
from rollback.layout import Entry, EntryKind, scan_entries

if TYPE_CHECKING:
    from concurrent.futures import Executor

MANIFEST_NAME = "chronicle-manifest.json"
VERSION = 1
CHUNK_BYTES = 4 * 2**20
MAX_MANIFEST_BYTES = 64 * 2**20
WRITE_ANEW = "when the checkpoint is what you want, write it anew with `chronicle manifest`"


class OtherVersion(UnreadableFile):
    """A manifest that is whole, but of a version that this program does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    """One file as it was written: relative posix path, size, SHA-256 and CRC-32 in hex, None while pending."""

    path: str
    size_bytes: int
    sha256: str | None = None
    crc32: str | None = None

    def to_json(self) -> dict[str, object]:
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

    def find(self, path: str) -> ManifestFile | None:
        """The file of that relative path, or None."""
        return next((file for file in self.files if file.path == path), None)


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest in `directory`, None when there is none; UnreadableFile when it is damaged or of another version."""
    path = directory / MANIFEST_NAME
    try:
        found = json.loads(read_bounded(path, MAX_MANIFEST_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        raise UnreadableFile(f"`{path}` cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise UnreadableFile(f"`{path}` is no JSON: {problem}", WRITE_ANEW) from None
    return manifest_from_json(found, str(path))


def manifest_from_json(found: object, where: str) -> Manifest:
    """A manifest from its JSON form; UnreadableFile names what is wrong and where."""
    if not isinstance(found, dict):
        raise UnreadableFile(f"`{where}` holds a {type(found).__name__}: an object was expected")
    if found.get("v") != VERSION:
        raise OtherVersion(f"`{where}` has version {found.get('v')!r}: version {VERSION} is known", "use a newer chronicle")
    try:
        files = tuple(_listed_file(record) for record in found["files"])
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise UnreadableFile(f"`{where}`: its list of files cannot be read ({problem!r})", WRITE_ANEW) from None
    if found.get("memory") is not None and not _is_memory(found["memory"]):
        raise UnreadableFile(f"`{where}`: `memory` has another shape than what a guard records at save", WRITE_ANEW)
    known = {"v", "step", "files", "digests", "memory", "run", "launch"}
    step, memory, launch = found.get("step"), found.get("memory"), found.get("launch")
    return Manifest(
        step=step if is_count(step) else None,
        files=files,
        digests=str(found.get("digests", "pending")),
        memory=memory if isinstance(memory, dict) else None,
        run=found["run"] if isinstance(found.get("run"), str) else None,
        launch=launch if is_count(launch) else None,
        more={key: value for key, value in found.items() if key not in known},
    )


def _listed_file(record: Mapping[str, object]) -> ManifestFile:
    path, size, sha256, crc32 = record["path"], record["size"], record.get("sha256"), record.get("crc32")
    if not isinstance(path, str) or not is_count(size):
        raise ValueError(f"{str(path)[:80]!r} of {str(size)[:40]} bytes")
    if not isinstance(sha256, str | None) or not isinstance(crc32, str | None):
        raise ValueError(f"digests of {path[:80]!r} are no text")
    return ManifestFile(path=path, size_bytes=size, sha256=sha256, crc32=crc32)


def is_count(value: object) -> TypeGuard[int]:
    """Whether this can be a number of bytes, steps or launches: whole, not negative, and of 63 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_memory(memory: object) -> bool:
    """Whether the parts that others compute with have the shape that the guard gives them."""
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
) -> Manifest:
    """List every file below `directory` and write the manifest by temp file, fsync, rename, directory fsync."""
    files: list[ManifestFile] = []
    for entry in listed_entries(directory):
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
    """Write `manifest` into `directory`, replacing the one that is there in one step."""
    target = directory / MANIFEST_NAME
    temporary = directory / f".{MANIFEST_NAME}.{os.getpid()}"
    text = json.dumps(manifest.to_json(), indent=1, allow_nan=False, default=float) + "\n"
    try:
        with open(temporary, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def listed_entries(directory: Path) -> tuple[Entry, ...]:
    """The files a manifest lists: everything that is a file (or a link to one) except manifests themselves."""
    return tuple(
        entry
        for entry in scan_entries(directory)
        if entry.kind in (EntryKind.FILE, EntryKind.LINK) and not is_manifest_name(entry.name)
    )


def is_manifest_name(name: str) -> bool:
    """Whether a file is a manifest or one being written."""
    return name == MANIFEST_NAME or name.startswith(f".{MANIFEST_NAME}.")


def digest_file(path: Path) -> tuple[str, str]:
    """(SHA-256, CRC-32) of a file in hex, read once in chunks."""
    import hashlib  # 5 ms that no one else here needs

    sha, crc = hashlib.sha256(), 0
    buffer = bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    try:
        # a link may lead to a pipe or a device, on which a plain open waits and a read never ends
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0) as f:
            if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
                raise UnreadableFile(f"`{path}` leads to no regular file", "remove it from the checkpoint")
            while count := f.readinto(buffer):
                sha.update(view[:count])
                crc = zlib.crc32(view[:count], crc)
    except OSError as problem:
        raise UnreadableFile(f"`{path}` cannot be read: {problem.strerror}") from None
    return sha.hexdigest(), f"{crc:08x}"


def compare_manifest(
    directory: Path,
    manifest: Manifest,
    *,
    full: bool,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> list[Finding]:
    """Compare a directory with its manifest: names and sizes (F1), with `full` also contents (F3)."""
    entries = {entry.path: entry for entry in listed_entries(directory)}
    listed = {file.path: file for file in manifest.files}
    findings = [_vanished(path) for path in sorted(listed.keys() - entries.keys())]
    findings += [_unlisted(entries[path]) for path in sorted(entries.keys() - listed.keys())]
    same_size = []
    for path in sorted(listed.keys() & entries.keys()):
        if entries[path].size_bytes != listed[path].size_bytes:
            findings.append(_other_size(listed[path], entries[path]))
        else:
            same_size.append(listed[path])
    if full:
        findings += _compare_contents(directory, same_size, executor, progress)
    return findings


def _compare_contents(
    directory: Path, files: Sequence[ManifestFile], executor: Executor | None, progress: Progress | None
) -> list[Finding]:
    """By CRC-32 on all cores where the manifest has one: three times as fast as SHA-256, and enough against bit rot."""
    targets = [
        ChecksumTarget(
            path=directory / file.path,
            name=file.path,
            label="content",
            offset=0,
            length=file.size_bytes,
            expected=int(file.crc32, 16),
        )
        for file in files
        if file.crc32 and _is_hex(file.crc32)
    ]
    wrong = [
        (target.name, f"{crc:08x}", f"{target.expected:08x}")
        for target, crc in wrong_checksums(targets, executor, progress)
    ]
    for file in files:
        if file.sha256 and not (file.crc32 and _is_hex(file.crc32)):
            digest = digest_file(directory / file.path)[0]
            if digest != file.sha256:
                wrong.append((file.path, digest[:12], file.sha256[:12]))
    return [
        Finding(
            check="F3",
            severity=Severity.ERROR,
            path=name,
            message=f"content changed since it was saved: digest {found}, the manifest says {expected}",
            remedy="go back to an intact checkpoint; if you changed the file on purpose, run `chronicle manifest`",
        )
        for name, found, expected in wrong
    ]


def _is_hex(text: str) -> bool:
    return re.fullmatch(r"[0-9a-fA-F]{8}", text) is not None


def _vanished(path: str) -> Finding:
    return Finding(
        check="F1",
        severity=Severity.ERROR,
        path=path,
        message="the manifest lists this file, but it is not there",
        remedy="restore it, or go back to a complete checkpoint",
    )


def _unlisted(entry: Entry) -> Finding:
    return Finding(
        check="F1",
        severity=Severity.WARN,
        path=entry.path,
        message=f"this file of {entry.size_bytes} bytes is not in the manifest: it was added after the save",
        remedy="move it out of the checkpoint, or run `chronicle manifest` to take it in",
    )


def _other_size(file: ManifestFile, entry: Entry) -> Finding:
    return Finding(
        check="F1",
        severity=Severity.ERROR,
        path=file.path,
        message=f"{entry.size_bytes} bytes, the manifest says {file.size_bytes}",
        remedy="go back to an intact checkpoint; if you changed the file on purpose, run `chronicle manifest`",
    )
