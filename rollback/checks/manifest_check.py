"""A directory compared with its manifest: names and sizes (F1), contents (F3)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollback.disk.checksums import ChecksumTarget, Progress, wrong_checksums
from rollback.findings import Finding, Severity
from rollback.checkpoint.layout import Entry
from rollback.checkpoint.manifest import Manifest, ManifestFile, digest_file, listed_entries

if TYPE_CHECKING:
    from concurrent.futures import Executor


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
