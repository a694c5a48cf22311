"""A torch zip whose `data.pkl` changes its length, put together from new bytes and ranges of the old file.

What lies behind the record moves by a multiple of 64 bytes, the difference being padded in the record's own extra
field ("FB", as PyTorch pads), so that tensors keep the alignment `mmap` wants. No tensor byte is read.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from rollback.errors import PlanRefused, UnreadableFile
from rollback.disk.new_file import Piece
from rollback.files.torch_tree import Segment
from rollback.files.torch_zip import CENTRAL_ENTRY, LOCAL_HEADER, Record, ZipLayout, read_at

ALIGNMENT = 64  # bytes; torch/serialization.py aligns storages to this
_FULL32 = 0xFFFFFFFF


def spliced_zip(fd: int, segment: Segment, layout: ZipLayout, new: bytes, size_bytes: int) -> Iterator[Piece]:
    """The whole file with `new` as its pickle record."""
    record = segment.record
    assert record is not None
    shift = -(-(len(new) - record.size_bytes) // ALIGNMENT) * ALIGNMENT
    padding = shift - (len(new) - record.size_bytes)
    if 0 < padding < 4:  # an extra field has a header of four bytes
        shift, padding = shift + ALIGNMENT, padding + ALIGNMENT
    behind = [r.header_offset for r in layout.records if r.header_offset > record.header_offset]
    next_offset = min([*behind, layout.directory_offset])
    crc = 0 if _has_no_checksums(layout) else zlib.crc32(new)
    yield range(record.header_offset)
    yield _local_header(fd, segment.pickle_offset, record, len(new), crc, padding)
    yield new
    yield _descriptor(read_at(fd, segment.pickle_offset + record.size_bytes, _descriptor_bytes(segment, next_offset)),
                      record, len(new), crc)  # fmt: skip
    yield range(next_offset, layout.directory_offset)
    yield _directory(fd, layout, record, shift, len(new), crc)
    yield _end_records(read_at(fd, layout.directory_offset + layout.directory_bytes,
                               size_bytes - layout.directory_offset - layout.directory_bytes), shift)  # fmt: skip


def _has_no_checksums(layout: ZipLayout) -> bool:
    return all(record.crc == 0 for record in layout.records)


def _local_header(fd: int, pickle_offset: int, record: Record, size: int, crc: int, padding: int) -> bytes:
    header = bytearray(read_at(fd, record.header_offset, pickle_offset - record.header_offset))
    fields = list(LOCAL_HEADER.unpack_from(header))
    if not record.flags & 8:
        fields[6], fields[7], fields[8] = crc, size, size
    extra = b"FB" + struct.pack("<H", padding - 4) + b"Z" * (padding - 4) if padding else b""
    fields[10] += len(extra)
    LOCAL_HEADER.pack_into(header, 0, *fields)
    return bytes(header) + extra


def _descriptor_bytes(segment: Segment, next_offset: int) -> int:
    assert segment.record is not None
    count = next_offset - segment.pickle_offset - segment.record.size_bytes
    if count not in ((12, 16, 20, 24) if segment.record.flags & 8 else (0,)):
        raise UnreadableFile(f"{count} bytes lie between `{segment.record.name}` and the next record: unknown layout")
    return count


def _descriptor(old: bytes, record: Record, size: int, crc: int) -> bytes:
    if not old:
        return old
    signature = old[:4] if len(old) in (16, 24) else b""
    return signature + struct.pack("<IQQ" if len(old) in (20, 24) else "<III", crc, size, size)


def _directory(fd: int, layout: ZipLayout, changed: Record, shift: int, size: int, crc: int) -> bytes:
    entries: list[bytes] = []
    for record in sorted(layout.records, key=lambda r: r.entry_offset):
        entry = bytearray(read_at(fd, record.entry_offset, record.entry_bytes))
        if record is changed:
            struct.pack_into("<III", entry, 16, crc, size, size)
        elif record.header_offset > changed.header_offset:
            _move_entry(entry, record, shift)
        entries.append(bytes(entry))
    return b"".join(entries)


def _move_entry(entry: bytearray, record: Record, shift: int) -> None:
    fields = CENTRAL_ENTRY.unpack_from(entry)
    offset = record.header_offset + shift
    if fields[16] != _FULL32:
        if offset >= _FULL32:
            raise PlanRefused(f"zip record `{record.name}` would cross 4 GiB, which its entry has no room to say")
        struct.pack_into("<I", entry, 42, offset)
        return
    old = struct.pack("<Q", record.header_offset)
    at = entry.find(old, CENTRAL_ENTRY.size + fields[10])
    if at < 0:
        raise UnreadableFile(f"zip record `{record.name}`: its zip64 field does not hold its offset")
    struct.pack_into("<Q", entry, at, offset)


def _end_records(old: bytes, shift: int) -> bytes:
    tail = bytearray(old)
    if tail[:4] == b"PK\x06\x06":
        struct.pack_into("<Q", tail, 48, struct.unpack_from("<Q", tail, 48)[0] + shift)
        locator = 12 + struct.unpack_from("<Q", tail, 4)[0]
        struct.pack_into("<Q", tail, locator + 8, struct.unpack_from("<Q", tail, locator + 8)[0] + shift)
    at = tail.rfind(b"PK\x05\x06")
    offset = struct.unpack_from("<I", tail, at + 16)[0]
    if offset != _FULL32:
        struct.pack_into("<I", tail, at + 16, offset + shift)
    return bytes(tail)
