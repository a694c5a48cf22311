"""Single files checked by their own structure and checksums (F3), without reading state out of them.

torch zips carry a CRC-32 per record that torch itself never checks (pytorch #126952): 300 of 300 flipped bits loaded
silently, and all were found by these CRCs. safetensors has no checksum; its header is checked against the file's size.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollback.disk.checksums import ChecksumTarget, Progress, wrong_checksums
from rollback.files.dcp_file import METADATA_NAME, read_dcp_index
from rollback.errors import RollbackError, UnknownFormat, UnreadableFile
from rollback.findings import Finding, Severity
from rollback.files.json_stream import json_parts
from rollback.files.safetensors_file import read_safetensors_header
from rollback.files.state_file import read_state_file
from rollback.files.torch_file import LEGACY_MAGIC, describe_foreign, naming, open_state_file
from rollback.files.torch_zip import (
    LOCAL_HEADER,
    MAX_DEFLATED_BYTES,
    Record,
    ZipLayout,
    data_offset,
    read_at,
    read_layout,
    read_record,
)

if TYPE_CHECKING:
    from concurrent.futures import Executor

TORCH_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}
Problem = tuple[str, str | None]  # what was found, the way out


def examine_file(path: Path, name: str, *, full: bool) -> tuple[list[Finding], list[ChecksumTarget]]:
    """F3 for one file called `name`: its structure, and with `full` what its checksums are to be compared with.

    A file of no known kind is only checked not to be empty.
    """
    try:
        problems, targets = _examine(path, name, full=full)
    except RollbackError as problem:
        problems, targets = [(problem.message.replace(f"`{path}`: ", ""), problem.remedy)], []
    return [damage(name, message, remedy) for message, remedy in problems], targets


def check_file(path: Path, name: str, *, full: bool) -> list[Finding]:
    """F3 for one file, its checksums included, here and now."""
    findings, targets = examine_file(path, name, full=full)
    return findings + checksum_findings(targets)


def checksum_findings(
    targets: Sequence[ChecksumTarget], executor: Executor | None = None, progress: Progress | None = None
) -> list[Finding]:
    """F3 for every target whose bytes are not what they were."""
    return [
        damage(
            target.name,
            f"{target.label} has CRC {crc:08x}, stored is {target.expected:08x}: its bytes changed after they were written",
            None,
        )
        for target, crc in wrong_checksums(targets, executor, progress)
    ]


def damage(name: str, message: str, remedy: str | None) -> Finding:
    """An F3 finding."""
    return Finding(
        check="F3",
        severity=Severity.ERROR,
        path=name,
        message=message,
        remedy=remedy or "restore the file from a copy, or go back to another checkpoint",
    )


def _examine(path: Path, name: str, *, full: bool) -> tuple[list[Problem], list[ChecksumTarget]]:
    if path.suffix == ".safetensors":
        read_safetensors_header(path)
        return [], []
    if path.suffix == ".distcp":
        return _examine_dcp(path, name) if full and (path.parent / METADATA_NAME).is_file() else ([], [])
    with open_state_file(path) as (fd, size_bytes), naming(path):
        head = os.pread(fd, 512, 0)
        if size_bytes == 0:
            return ([("the file is empty: a write was lost", None)] if path.suffix in TORCH_SUFFIXES else []), []
        if head.startswith(b"PK\x03\x04"):
            return _examine_zip(fd, read_layout(fd, 0, size_bytes), path, name, full=full)
        if not any(head) or head.startswith(b"version https://git-lfs"):
            return [describe_foreign(head, size_bytes)], []
        if path.suffix == ".json":
            for _ in json_parts(fd, 0, size_bytes, levels=0, wanted=lambda keys: False):
                pass
            return [], []
    if head[:1] == b"\x80" or head.startswith(LEGACY_MAGIC):
        read_state_file(path)
    elif path.suffix in TORCH_SUFFIXES:
        raise UnknownFormat(*describe_foreign(head, size_bytes))
    return [], []


def _examine_dcp(path: Path, name: str) -> tuple[list[Problem], list[ChecksumTarget]]:
    """Every entry of a `.distcp` is a zip of its own, with checksums of its own."""
    problems: list[Problem] = []
    targets: list[ChecksumTarget] = []
    with open_state_file(path) as (fd, size_bytes):
        for entry in read_dcp_index(path.parent / METADATA_NAME):
            for chunk in entry.chunks:
                if chunk.file == path.name and chunk.offset + chunk.length <= size_bytes:
                    layout = read_layout(fd, chunk.offset, chunk.length)
                    found, more = _examine_zip(fd, layout, path, name, full=True)
                    problems += [(f"entry `{entry.name}`: {message}", remedy) for message, remedy in found]
                    targets += more
    return problems, targets


def _examine_zip(
    fd: int, layout: ZipLayout, path: Path, name: str, *, full: bool
) -> tuple[list[Problem], list[ChecksumTarget]]:
    """Records whose local header disagrees with the directory, and those whose checksums are to be compared."""
    no_checksums = all(record.crc == 0 for record in layout.records)
    problems: list[Problem] = []
    targets: list[ChecksumTarget] = []
    for record in layout.records:
        try:
            start = _checked_start(fd, layout, record)
            if not full or no_checksums:
                continue
            if record.stored:
                label = f"record `{record.name}`"
                targets.append(ChecksumTarget(path=path, name=name, label=label, offset=start,
                                              length=record.size_bytes, expected=record.crc))  # fmt: skip
            elif zlib.crc32(read_record(fd, layout, record, max_bytes=MAX_DEFLATED_BYTES)) != record.crc:
                problems.append((f"record `{record.name}` has another CRC than is stored", None))
        except UnreadableFile as problem:
            problems.append((problem.message, problem.remedy))
    return problems, targets


def _checked_start(fd: int, layout: ZipLayout, record: Record) -> int:
    expected = record.name.encode("utf-8", "backslashreplace")
    header = read_at(fd, layout.base + record.header_offset, LOCAL_HEADER.size + len(expected))
    if header[LOCAL_HEADER.size :] != expected or header[:4] != b"PK\x03\x04":
        raise UnreadableFile(f"record `{record.name}`: its local header names something else")
    return data_offset(fd, layout, record)
