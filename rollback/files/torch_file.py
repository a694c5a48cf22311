"""Reads files that torch saved, without torch and without executing them.

Knows torch zips, torch's legacy stream (before 1.6, `torch.serialization._legacy_save`) and plain pickles.
Other contents are named in the error: Git LFS pointers, safetensors, gzip, tar. A range of a file can be read as a
file (entries of `.distcp`). `rollback.files.state_file` reads any state file; `rollback.files.state_file` edits one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rollback.disk import open_file, pread
from rollback.disk.content import disk_bytes, expect
from rollback.errors import UnknownFormat, UnreadableFile
from rollback.files.pickle_machine import Limits, PickleEndsEarly
from rollback.files.pickle_reader import PickleContent, read_pickle
from rollback.files.pickle_values import (
    Encoding,
    NumberPlace,
    StoredFloat,
    StoredInt,
    TensorRef,
    decode_number,
    item_size,
)
from rollback.files.torch_tree import Container, PickleSegment, TorchFile
from rollback.files.torch_zip import RECORD_BYTES, ZipLayout, ZipRecord, data_offset, read_at, read_layout, read_record

LEGACY_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
_MAX_SCALARS = 200_000
_SCALAR_RECORD = 512  # bytes: local header, name, padding to 64, and one number
_FIRST_WINDOW = 256 * 2**10

_T = TypeVar("_T")


def read_torch_file(path: Path | str, *, limits: Limits | None = None) -> TorchFile:
    """Read the torch zip, legacy stream or plain pickle at `path`.

    Raises `UnreadableFile` for damage and for anything but a regular file, `UnknownFormat` for any other content.
    """
    path = Path(path)
    with open_state_file(path) as (fd, size_bytes), naming(path):
        return read_torch_content(fd, path, size_bytes, limits=limits)


def read_torch_content(fd: int, path: Path, size_bytes: int, *, limits: Limits | None = None) -> TorchFile:
    """As `read_torch_file`, for a file that is open already."""
    limits = limits or Limits.for_file(disk_bytes(fd))
    head = pread(fd, 4096, 0)
    if head.startswith(b"PK\x03\x04"):
        return _read_zip(fd, path, size_bytes, limits)
    if head.startswith(LEGACY_MAGIC):
        return _read_legacy(fd, path, size_bytes, limits)
    if head[:1] == b"\x80" or head[:2] in (b"(d", b"(l", b"(i", b"(c") or head[:1] in (b"}", b"]"):
        return _read_plain(fd, path, size_bytes, limits)
    raise UnknownFormat(*describe_foreign(head, size_bytes))


@contextmanager
def open_state_file(path: Path) -> Iterator[tuple[int, int]]:
    """(file descriptor, size in bytes) of a regular file, opened without blocking on a FIFO."""
    try:
        fd = open_file(path, os.O_NOCTTY)
    except OSError as problem:
        raise UnreadableFile(f"`{path}` cannot be opened: {problem.strerror}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableFile(f"`{path}` is not a regular file: expected a state file")
        yield fd, status.st_size
    finally:
        os.close(fd)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Prefix errors raised inside with the name of the file."""
    try:
        yield
    except (UnreadableFile, UnknownFormat) as problem:
        if str(path) in problem.message:
            raise
        raise type(problem)(f"`{path}`: {problem.message}", problem.remedy) from None
    except OSError as problem:
        raise UnreadableFile(f"`{path}` cannot be read: {problem.strerror}") from None


def describe_foreign(head: bytes, size_bytes: int) -> tuple[str, str | None]:
    """(what these bytes are, a hint) for a file that is not a state file."""
    if size_bytes == 0:
        return "the file is empty: expected a state file", None
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        fields = dict(line.partition(" ")[::2] for line in head.decode("utf-8", "replace").splitlines())
        return (
            f"Git LFS pointer to {fields.get('oid', '?')} of {fields.get('size', '?')} bytes: the content is not here",
            "fetch it with `git lfs pull`",
        )
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size_bytes:
        return "a safetensors file: it holds tensors only, not training state", None
    if head.startswith(b"\x1f\x8b"):
        return "a gzip file: state files are not compressed", "unpack it first"
    if head[257:262] == b"ustar":
        return "a tar file: torch wrote these before 0.1.10", "load and save it once with a torch that reads it"
    if not any(head):
        return f"the file begins with {len(head)} zero bytes: a lost write or a hole", None
    return f"begins with {head[:8]!r}: no torch zip, legacy stream, pickle or JSON", None


def _torch_file(
    path: Path, container: Container, content: PickleContent, segment: PickleSegment, size_bytes: int, limits: Limits
) -> TorchFile:
    return TorchFile(
        path=path,
        container=container,
        tree=content.value,
        segments=(segment,),
        size_bytes=size_bytes,
        limits=limits,
        globals=content.globals,
        tensors=content.tensors,
    )


# --- torch zip


def _read_zip(fd: int, path: Path, size_bytes: int, limits: Limits) -> TorchFile:
    content, segment = read_zip_segment(fd, 0, size_bytes, index=0, limits=limits)
    return _torch_file(path, Container.ZIP, content, segment, size_bytes, limits)


def read_zip_segment(
    fd: int, base: int, length: int, *, index: int, limits: Limits | None = None
) -> tuple[PickleContent, PickleSegment]:
    """Read the torch zip at `[base, base + length)`; places in it carry segment number `index`."""
    limits = limits or Limits()
    layout = read_layout(fd, base, length)
    limits = limits.less(RECORD_BYTES * len(layout.records))
    record = _pickle_record(layout)
    content = read_pickle(read_record(fd, layout, record, max_bytes=limits.num_bytes), segment=index, limits=limits)
    big_endian = _fill_zip_scalars(fd, layout, record, content.tensors, index)
    segment = PickleSegment(
        pickle_offset=data_offset(fd, layout, record),
        pickle_bytes=record.size_bytes,
        frames=content.frames,
        layout=layout,
        record=record,
        big_endian=big_endian,
    )
    return content, segment


def _pickle_record(layout: ZipLayout) -> ZipRecord:
    found = layout.by_suffix("/data.pkl")
    if len(found) != 1:
        names = ", ".join(record.name for record in layout.records[:5]) or "nothing"
        raise UnknownFormat(f"a zip with {len(found)} records `data.pkl` ({names}): a torch file has exactly one")
    return found[0]


def _fill_zip_scalars(fd: int, layout: ZipLayout, pickle: ZipRecord, tensors: tuple[TensorRef, ...], index: int) -> bool:
    """Read the values of 0-dim tensors; returns whether the file is big-endian."""
    scalars = [tensor for tensor in tensors if tensor.shape == () and tensor.storage is not None]
    if not scalars:
        return False
    folder = pickle.name.removesuffix("data.pkl")
    order = layout.find(folder + "byteorder")
    big_endian = order is not None and read_record(fd, layout, order, max_bytes=64) == b"big"
    found = (layout.find(f"{folder}data/{t.storage.key}") for t in scalars[:_MAX_SCALARS] if t.storage is not None)
    expect(fd, ((layout.base + r.header_offset, _SCALAR_RECORD) for r in found if r is not None and r.size_bytes <= 16))
    for tensor in scalars[:_MAX_SCALARS]:
        assert tensor.storage is not None
        record = layout.find(f"{folder}data/{tensor.storage.key}")
        size = item_size(tensor.dtype)
        if record is None or size is None or not record.stored:
            continue
        offset = tensor.storage_offset * size
        if offset + size <= record.size_bytes:
            raw = read_at(fd, data_offset(fd, layout, record) + offset, size)
            place = None if big_endian else NumberPlace(index, offset, size, Encoding.RAW, tensor.dtype, record.name)
            tensor.value = stored_number(decode_number(raw, tensor.dtype, big_endian=big_endian), place)
    return big_endian


def stored_number(value: float | int | bool | None, place: NumberPlace | None) -> StoredFloat | StoredInt | bool | None:
    """The number with its place, as a `StoredFloat` or `StoredInt`; bool and None are returned as they are."""
    if value is None or isinstance(value, bool):
        return value
    return StoredFloat(value, place) if isinstance(value, float) else StoredInt(value, place)


# --- pickles that begin the file


def _read_window(fd: int, size_bytes: int, limits: Limits, parse: Callable[[bytes], _T]) -> _T:
    """Parse the beginning of a file, reading more only when the pickle turns out to be longer."""
    window = _FIRST_WINDOW
    while True:
        window = min(window, size_bytes, limits.num_bytes)
        try:
            return parse(read_at(fd, 0, window))
        except PickleEndsEarly as problem:
            if window == size_bytes:
                raise UnreadableFile(f"{problem.message}: truncated") from None
            if window == limits.num_bytes:
                raise UnreadableFile(f"the pickle is longer than {limits.num_bytes} bytes") from None
            window *= 8


def _read_plain(fd: int, path: Path, size_bytes: int, limits: Limits) -> TorchFile:
    content = _read_window(fd, size_bytes, limits, lambda data: read_pickle(data, limits=limits))
    if content.end != size_bytes:
        raise UnreadableFile(f"{size_bytes - content.end} bytes follow the end of the pickle at {content.end}")
    segment = PickleSegment(pickle_offset=0, pickle_bytes=content.end, frames=content.frames)
    return _torch_file(path, Container.PICKLE, content, segment, size_bytes, limits)


def _read_legacy(fd: int, path: Path, size_bytes: int, limits: Limits) -> TorchFile:
    """Magic, protocol, system info, the object, the storage keys; then each storage: element count, bytes."""

    def parse(data: bytes) -> tuple[PickleContent, PickleContent, PickleContent]:
        protocol = read_pickle(data, start=len(LEGACY_MAGIC), limits=limits)
        system = read_pickle(data, start=protocol.end, limits=limits)
        content = read_pickle(data, start=system.end, limits=limits)
        return system, content, read_pickle(data, start=content.end, limits=limits)

    system, content, keys = _read_window(fd, size_bytes, limits, parse)
    little = not (isinstance(system.value, dict) and system.value.get("little_endian") is False)
    _fill_legacy_scalars(fd, size_bytes, content, keys, little_endian=little)
    segment = PickleSegment(pickle_offset=0, pickle_bytes=content.end, frames=content.frames, big_endian=not little)
    return _torch_file(path, Container.LEGACY, content, segment, size_bytes, limits)


def _fill_legacy_scalars(
    fd: int, size_bytes: int, content: PickleContent, keys: PickleContent, *, little_endian: bool
) -> None:
    dtypes = {t.storage.key: t.storage.dtype for t in content.tensors if t.storage is not None}
    starts: dict[str, tuple[int, int]] = {}
    at = keys.end
    names = keys.value if isinstance(keys.value, list) else []
    for name in names:
        size = item_size(dtypes.get(name, "")) if isinstance(name, str) else None
        if size is None:
            break  # a storage of unknown width: nothing behind it can be located
        numel = int.from_bytes(read_at(fd, at, 8), "little")
        starts[name] = (at + 8, numel * size)
        at += 8 + numel * size
        if at > size_bytes:
            raise UnreadableFile(f"storage `{name}` ends at byte {at}, the file at {size_bytes}: truncated")
    for tensor in content.tensors:
        if tensor.shape != () or tensor.storage is None or tensor.storage.key not in starts:
            continue
        (start, length), size = starts[tensor.storage.key], item_size(tensor.dtype)
        offset = tensor.storage_offset * (size or 0)
        if size and offset + size <= length:
            place = NumberPlace(0, start + offset, size, Encoding.RAW, tensor.dtype, "") if little_endian else None
            raw = read_at(fd, start + offset, size)
            tensor.value = stored_number(decode_number(raw, tensor.dtype, big_endian=not little_endian), place)
