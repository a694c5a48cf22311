"""Checks of a checkpoint's files: structure and checksums (F3), and a sample of the optimizer's moments (F6).

torch zips carry a CRC-32 per record that torch itself does not check (pytorch #126952): 300 of 300 flipped bits loaded
silently, and these CRCs found all of them. safetensors has no checksum; its header is checked against the file size.
Moments: an optimizer state that was dropped and created again has all-zero second moments although its step counters
are high (KempnerForge #115), and NaN in them persists. A few tens of kilobytes of a few tensors are read.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollback.checkpoint.account import is_safetensors, is_torch, read_head
from rollback.checkpoint.layout import Checkpoint, FileType, scan_entries
from rollback.checkpoint.state import OptimizerState, as_mapping, find_states
from rollback.checkpoint.state_digest import place_of_elements
from rollback.disk import pread
from rollback.disk.content import ByteProgress, ChecksumTarget, wrong_checksums
from rollback.errors import Finding, RollbackError, Severity, UnknownFormat, UnreadableFile
from rollback.files.dcp_file import METADATA_NAME, read_dcp_index
from rollback.files.json_file import json_parts
from rollback.files.pickle_values import TensorRef
from rollback.files.safetensors_file import check_safetensors
from rollback.files.state_file import read_state_file
from rollback.files.torch_file import LEGACY_MAGIC, describe_foreign, naming, open_state_file
from rollback.files.torch_tree import TorchFile
from rollback.files.torch_zip import (
    LOCAL_HEADER,
    MAX_DEFLATED_BYTES,
    ZipLayout,
    ZipRecord,
    data_offset,
    read_at,
    read_layout,
    read_record,
)

if TYPE_CHECKING:
    from concurrent.futures import Executor

TORCH_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}
Problem = tuple[str, str | None]  # what was found, the way out


def examine_file(
    path: Path, name: str, *, full: bool, known: bool = True
) -> tuple[list[Finding], list[ChecksumTarget]]:
    """F3 for one file called `name`: findings about its structure, and with `full` the checksums to compare.

    Of a file of unknown kind, only emptiness is checked. `known`: the checkpoint's writer makes a file of this name; then
    its ending says what it must be. A script may save anything as `.bin`.
    """
    try:
        problems, targets = _examine(path, name, full=full)
    except UnknownFormat as problem:
        problems, targets = [(problem.message.replace(f"`{path}`: ", ""), problem.remedy)] if known else [], []
    except RollbackError as problem:
        problems, targets = [(problem.message.replace(f"`{path}`: ", ""), problem.remedy)], []
    return [damage(name, message, remedy) for message, remedy in problems], targets


def checksum_findings(
    targets: Sequence[ChecksumTarget], executor: Executor | None = None, progress: ByteProgress | None = None
) -> list[Finding]:
    """F3 for the targets whose bytes have another checksum than stored."""
    return [
        damage(
            target.name,
            f"{target.label} has CRC {crc:08x}, expected {target.expected:08x}: its bytes changed after they were written",
            None,
        )
        for target, crc in wrong_checksums(targets, executor, progress)
    ]


def damage(name: str, message: str, remedy: str | None) -> Finding:
    """An F3 finding."""
    return Finding(
        "F3",
        Severity.ERROR,
        name,
        message,
        remedy or "restore the file from a copy, or go back to another checkpoint",
    )


def _examine(path: Path, name: str, *, full: bool) -> tuple[list[Problem], list[ChecksumTarget]]:
    if path.suffix == ".safetensors":
        check_safetensors(path)
        return [], []
    if path.suffix == ".distcp":
        return _examine_dcp(path, name) if full and (path.parent / METADATA_NAME).is_file() else ([], [])
    with open_state_file(path) as (fd, size_bytes), naming(path):
        head = pread(fd, 512, 0)
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
    """F3 for a `.distcp` file: each of its entries is a zip with its own checksums."""
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
                problems.append((f"record `{record.name}` does not have the stored CRC", None))
        except UnreadableFile as problem:
            problems.append((problem.message, problem.remedy))
    return problems, targets


def _checked_start(fd: int, layout: ZipLayout, record: ZipRecord) -> int:
    expected = record.name.encode("utf-8", "backslashreplace")
    header = read_at(fd, layout.base + record.header_offset, LOCAL_HEADER.size + len(expected))
    if header[LOCAL_HEADER.size :] != expected or header[:4] != b"PK\x03\x04":
        raise UnreadableFile(f"record `{record.name}`: its local header has another name")
    return data_offset(fd, layout, record)


# --- whether a file of any name holds state


def holds_state(path: Path) -> bool:
    """Whether this is state that a loader takes, whole or cut, by its content; of a directory, whether a file in it is.

    Known are what torch saved, pickles with tensors or states in them, and safetensors. Raises `UnreadableFile` where it
    cannot be read.
    """
    if path.is_dir():
        inner = [entry for entry in scan_entries(path, levels=2) if entry.kind is FileType.FILE]
        return any(holds_state(path / entry.path) for entry in inner)
    head = read_head(path)
    if is_torch(head) or is_safetensors(head):
        return True
    if head[:1] != b"\x80":
        return False
    try:
        found = read_state_file(path)
    except (UnknownFormat, UnreadableFile):
        return False
    return bool(found.tensors) or any(True for _ in find_states(found.tree))


# --- F6: samples of the optimizer's moments

SAMPLE_BYTES = 64 * 2**10
TENSORS_A_FILE = 4
SECOND_MOMENTS = ("exp_avg_sq", "v", "second_moment")
STEPS_BEFORE_ALIVE = 2


def check_moments(checkpoint: Checkpoint, optimizers: Sequence[OptimizerState], *, max_files: int) -> list[Finding]:
    """F6 findings for the first `max_files` optimizer files that are torch zips."""
    chosen = [o for o in optimizers if o.steps and o.steps[1] > STEPS_BEFORE_ALIVE and not o.file.endswith(".metadata")]
    return [finding for o in chosen[:max_files] for finding in _check(checkpoint, o)]


def _check(checkpoint: Checkpoint, optimizer: OptimizerState) -> list[Finding]:
    try:
        file = read_state_file(checkpoint.folder / optimizer.file)
        samples = list(_samples(file, optimizer))
    except RollbackError:
        return []  # an unreadable file has its own finding
    if not samples:
        return []
    found = []
    if not any(any(raw) for raw, _ in samples):
        steps = optimizer.steps[1] if optimizer.steps else 0
        found.append(("F6", f"second moments are all zero after {steps} steps: the optimizer state was created again"))
    if any(dtype == "float32" and any(x != x for x in array("f", raw)) for raw, dtype in samples):
        found.append(("F11", "second moments hold NaN"))
    return [
        Finding(
            check,
            Severity.ERROR,
            optimizer.file,
            message,
            "go back to an earlier checkpoint",
        )
        for check, message in found
    ]


def _samples(file: TorchFile, optimizer: OptimizerState) -> Iterator[tuple[bytes, str]]:
    """(first bytes, element type) of a few second-moment tensors."""
    state = as_mapping(file.get((*optimizer.prefix, "state"))) or {}
    tensors = [
        moment
        for entry in state.values()
        for name in SECOND_MOMENTS
        if isinstance(moment := (as_mapping(entry) or {}).get(name), TensorRef) and moment.numel
    ]
    with open_state_file(file.path) as (fd, _):
        for tensor in tensors[:TENSORS_A_FILE]:
            place = place_of_elements(fd, file.segments[0], tensor)
            if place is not None:  # a sample is a whole number of elements of every type
                yield read_at(fd, place[0], min(place[1], SAMPLE_BYTES)), tensor.dtype
