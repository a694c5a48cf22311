"""Single files checked by their own structure and checksums (F3), without reading state out of them.

torch zips carry a CRC-32 per record that torch itself never checks (pytorch #126952): 300 of 300 flipped bits loaded
silently, and all were found by these CRCs. safetensors has no checksum; its header is checked against the file's size.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path

from rollback.errors import RollbackError, UnknownFormat, UnreadableFile
from rollback.findings import Finding, Severity
from rollback.safetensors_file import read_safetensors_header
from rollback.torch_file import LEGACY_MAGIC, describe_foreign, naming, open_state_file, read_torch_file
from rollback.torch_zip import (
    CHUNK_BYTES,
    LOCAL_HEADER,
    MAX_DIRECTORY_BYTES,
    Record,
    ZipLayout,
    data_offset,
    read_at,
    read_layout,
    read_record,
)

Progress = Callable[[int], None]
TEXT_SUFFIXES = {".json", ".jsonl", ".txt", ".md", ".py", ".yaml", ".yml", ".toml", ".csv", ".log", ""}
TORCH_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}


def check_file(path: Path, name: str, *, full: bool, progress: Progress | None = None) -> list[Finding]:
    """F3 for one file called `name`: structure, and with `full` the checksum of every record.

    `progress` is told the bytes that were read. A file of no known kind is only checked not to be empty.
    """
    try:
        problems = list(_problems(path, full=full, progress=progress or (lambda _: None)))
    except RollbackError as problem:
        problems = [(problem.message.replace(f"`{path}`: ", ""), problem.remedy)]
    return [
        Finding(
            check="F3",
            severity=Severity.ERROR,
            path=name,
            message=message,
            remedy=remedy or "restore the file from a copy, or go back to another checkpoint",
        )
        for message, remedy in problems
    ]


def _problems(path: Path, *, full: bool, progress: Progress) -> list[tuple[str, str | None]]:
    if path.suffix == ".safetensors":
        read_safetensors_header(path)
        return []
    if path.suffix == ".distcp":
        return []  # entries are located by the `.metadata` beside it; the DCP reader checks them
    with open_state_file(path) as (fd, size_bytes), naming(path):
        head = os.pread(fd, 512, 0)
        if size_bytes == 0:
            return [("the file is empty: a write was lost", None)] if path.suffix in TORCH_SUFFIXES else []
        if head.startswith(b"PK\x03\x04"):
            return _zip_problems(fd, read_layout(fd, 0, size_bytes), full=full, progress=progress)
        if not any(head) or head.startswith(b"version https://git-lfs"):
            return [describe_foreign(head, size_bytes)]
    if path.suffix == ".json":
        return _json_problems(path)
    if head[:1] == b"\x80" or head.startswith(LEGACY_MAGIC):
        read_torch_file(path)
    elif path.suffix in TORCH_SUFFIXES:
        raise UnknownFormat(*describe_foreign(head, size_bytes))
    return []


def _json_problems(path: Path) -> list[tuple[str, str | None]]:
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError) as problem:
        return [(f"no valid JSON: {problem}", None)]
    return []


def _zip_problems(fd: int, layout: ZipLayout, *, full: bool, progress: Progress) -> list[tuple[str, str | None]]:
    """Every record whose local header or checksum disagrees with the directory."""
    no_checksums = all(record.crc == 0 for record in layout.records)
    problems: list[tuple[str, str | None]] = []
    for record in layout.records:
        try:
            _check_local_header(fd, layout, record)
            if full and not no_checksums:
                crc = record_crc(fd, layout, record, progress)
                if crc != record.crc:
                    problems.append((f"record `{record.name}` has CRC {crc:08x}, stored is {record.crc:08x}: its bytes "
                                     "changed after they were written", None))  # fmt: skip
        except UnreadableFile as problem:
            problems.append((problem.message, problem.remedy))
    return problems


def _check_local_header(fd: int, layout: ZipLayout, record: Record) -> None:
    header = read_at(fd, layout.base + record.header_offset, LOCAL_HEADER.size + len(record.name.encode()))
    if header[LOCAL_HEADER.size :] != record.name.encode() or header[:4] != b"PK\x03\x04":
        raise UnreadableFile(f"record `{record.name}`: its local header names something else")
    data_offset(fd, layout, record)


def record_crc(fd: int, layout: ZipLayout, record: Record, progress: Progress) -> int:
    """CRC-32 of a record's content, read in chunks."""
    if not record.stored:
        data = read_record(fd, layout, record, max_bytes=MAX_DIRECTORY_BYTES)
        progress(record.compressed_bytes)
        return zlib.crc32(data)
    offset, left, crc = data_offset(fd, layout, record), record.size_bytes, 0
    while left:
        part = read_at(fd, offset, min(left, CHUNK_BYTES))
        crc = zlib.crc32(part, crc)
        offset += len(part)
        left -= len(part)
        progress(len(part))
    return crc
