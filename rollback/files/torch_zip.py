"""The zip files that `torch.save` writes: finds records by their headers, reads them within limits, checks them.

Layout after PKWARE's APPNOTE (§4.3), as PyTorch's miniz writes it: records stored without compression, bit 3 set,
CRC and sizes in a data descriptor behind each record and in the central directory, zip64 where numbers need it.
The zip may be a range of a larger file (the entries of a `.distcp`). Nothing is unpacked to disk. Names such as `../x`
are refused, because no checkpoint writer makes them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from rollback.disk import pread
from rollback.disk.content import disk_bytes
from rollback.errors import UnreadableFile

_MAX_RECORDS = 60_000  # in a file of any size; more need 8 kB on disk each
_MAX_DIRECTORY_BYTES = 8 * 2**20
_MAX_NAME_BYTES = 1024
MAX_DEFLATED_BYTES = 24 * 2**20  # torch does not compress; raw and inflated bytes are held at the same time
RECORD_BYTES = 400  # in memory
CHUNK_BYTES = 4 * 2**20

LOCAL_HEADER = struct.Struct("<4s5H3I2H")
CENTRAL_ENTRY = struct.Struct("<4s6H3I5H2I")
_END_RECORD = struct.Struct("<4s4H2IH")
_END64_RECORD = struct.Struct("<4sQ2H2I4Q")
_END64_LOCATOR = struct.Struct("<4sIQI")
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One entry of the central directory. Offsets count from the start of the zip, sizes in bytes.

    `entry_offset` is where the entry itself lies, `header_offset` the local header it points to.
    """

    name: str
    method: int
    flags: int
    crc: int
    compressed_bytes: int
    size_bytes: int
    header_offset: int
    entry_offset: int

    @property
    def stored(self) -> bool:
        """Whether the record is not compressed."""
        return self.method == 0


@dataclass(frozen=True, kw_only=True)
class ZipLayout:
    """A zip at `[base, base + length)` of a file: its records in directory order, and the place of its directory."""

    base: int
    length: int
    records: tuple[ZipRecord, ...]
    directory_offset: int
    directory_bytes: int

    def find(self, name: str) -> ZipRecord | None:
        """The record of that full name, or None."""
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> dict[str, ZipRecord]:
        return {record.name: record for record in self.records}

    def by_suffix(self, suffix: str) -> tuple[ZipRecord, ...]:
        """Records whose name ends in `suffix`; torch puts every record below one folder named after the file."""
        return tuple(record for record in self.records if record.name.endswith(suffix))


def read_at(fd: int, offset: int, count: int) -> bytes:
    """Exactly `count` bytes at `offset`; raises `UnreadableFile` when there are fewer."""
    if count < 0 or offset < 0:
        raise UnreadableFile(f"{count} bytes at {offset} were requested: the offsets are damaged")
    parts: list[bytes] = []
    while count:
        part = pread(fd, min(count, 2**30), offset)
        if not part:
            raise UnreadableFile(f"file ends at byte {offset}: expected {count} more bytes")
        parts.append(part)
        offset += len(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_layout(fd: int, base: int, length: int) -> ZipLayout:
    """Locate every record of the zip at `[base, base + length)`; raises UnreadableFile when it is not intact."""
    num_records, directory_bytes, directory_offset, end_offset = _end_of_directory(fd, base, length)
    room = disk_bytes(fd)
    if num_records > _MAX_RECORDS + room // 8192 or directory_bytes > _MAX_DIRECTORY_BYTES + room // 64:
        raise UnreadableFile(f"zip directory of {num_records} records in {directory_bytes} bytes: too large to read")
    if directory_offset + directory_bytes > end_offset:
        raise UnreadableFile("zip directory overlaps the end of the file: truncated or damaged")
    directory = read_at(fd, base + directory_offset, directory_bytes)
    records = tuple(_entries(directory, num_records, directory_offset))
    _check_records(records, directory_offset)
    return ZipLayout(
        base=base,
        length=length,
        records=records,
        directory_offset=directory_offset,
        directory_bytes=directory_bytes,
    )


def _end_of_directory(fd: int, base: int, length: int) -> tuple[int, int, int, int]:
    """(records, directory bytes, directory offset, offset of the first end record)."""
    window = min(length, _END_RECORD.size + _FULL16)
    tail = read_at(fd, base + length - window, window)
    at = tail.rfind(b"PK\x05\x06")
    while at >= 0:
        if at + _END_RECORD.size <= len(tail):
            end = _END_RECORD.unpack_from(tail, at)
            if at + _END_RECORD.size + end[7] == len(tail):
                break
        at = tail.rfind(b"PK\x05\x06", 0, at)
    else:
        raise UnreadableFile("zip without an end-of-directory record: truncated, or bytes follow its end")
    _, disk, directory_disk, _, num_records, directory_bytes, directory_offset, _ = end
    if disk or directory_disk:
        raise UnreadableFile("zip split over several volumes")
    end_offset = length - window + at
    if _FULL32 in (directory_bytes, directory_offset) or num_records == _FULL16:
        return _end64(fd, base, end_offset)
    return num_records, directory_bytes, directory_offset, end_offset


def _end64(fd: int, base: int, end_offset: int) -> tuple[int, int, int, int]:
    locator_offset = end_offset - _END64_LOCATOR.size
    signature, _, record_offset, _ = _END64_LOCATOR.unpack(read_at(fd, base + locator_offset, _END64_LOCATOR.size))
    if signature != b"PK\x06\x07" or not 0 <= record_offset <= locator_offset - _END64_RECORD.size:
        raise UnreadableFile("zip64 locator is missing or points outside the file")
    end = _END64_RECORD.unpack(read_at(fd, base + record_offset, _END64_RECORD.size))
    if end[0] != b"PK\x06\x06":
        raise UnreadableFile("zip64 end record is missing where its locator points")
    return end[7], end[8], end[9], record_offset


def _entries(directory: bytes, num_records: int, directory_offset: int) -> Iterator[ZipRecord]:
    at = 0
    for _ in range(num_records):
        if at + CENTRAL_ENTRY.size > len(directory):
            raise UnreadableFile(f"zip directory ends inside entry at {directory_offset + at}")
        entry = CENTRAL_ENTRY.unpack_from(directory, at)
        if entry[0] != b"PK\x01\x02":
            raise UnreadableFile(f"zip directory entry at {directory_offset + at} has no signature")
        name_bytes, extra_bytes, comment_bytes = entry[10:13]
        if name_bytes > _MAX_NAME_BYTES:
            raise UnreadableFile(f"zip directory entry at {directory_offset + at} has a name of {name_bytes} bytes")
        end = at + CENTRAL_ENTRY.size + name_bytes + extra_bytes + comment_bytes
        if end > len(directory):
            raise UnreadableFile(f"zip directory ends inside entry at {directory_offset + at}")
        start = at + CENTRAL_ENTRY.size
        name = directory[start : start + name_bytes].decode("utf-8", "backslashreplace")
        extra = directory[start + name_bytes : start + name_bytes + extra_bytes]
        size, compressed, header = _zip64_numbers(extra, entry[9], entry[8], entry[16])
        yield ZipRecord(name, entry[4], entry[3], entry[7], compressed, size, header, directory_offset + at)
        at = end
    if at != len(directory):
        raise UnreadableFile(f"zip directory has {len(directory) - at} bytes behind its last entry")


def _zip64_numbers(extra: bytes, size: int, compressed: int, header: int) -> tuple[int, int, int]:
    """Size, compressed size and header offset, taken from the zip64 extra field where the entry says so."""
    if _FULL32 not in (size, compressed, header):
        return size, compressed, header
    at = 0
    while at + 4 <= len(extra):
        kind, count = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            numbers = iter(struct.unpack_from(f"<{min(count, len(extra) - at - 4) // 8}Q", extra, at + 4))
            try:
                size = next(numbers) if size == _FULL32 else size
                compressed = next(numbers) if compressed == _FULL32 else compressed
                header = next(numbers) if header == _FULL32 else header
            except StopIteration:
                raise UnreadableFile("zip64 field is shorter than its entry needs") from None
            return size, compressed, header
        at += 4 + count
    return size, compressed, header


def _check_records(records: tuple[ZipRecord, ...], directory_offset: int) -> None:
    names: set[str] = set()
    end = 0
    for record in sorted(records, key=lambda r: r.header_offset):
        _check_name(record.name)
        if record.name in names:
            raise UnreadableFile(f"zip record `{record.name}` appears twice: readers disagree on which one to use")
        names.add(record.name)
        if record.header_offset < end:
            raise UnreadableFile(f"zip record `{record.name}` overlaps the one before it")
        end = record.header_offset + LOCAL_HEADER.size + record.compressed_bytes
        if end > directory_offset:
            raise UnreadableFile(f"zip record `{record.name}` reaches beyond the directory: truncated or damaged")


def _check_name(name: str) -> None:
    parts = name.split("/")
    if not name or name.startswith("/") or "\0" in name or "\\" in name or any(p in ("", ".", "..") for p in parts):
        raise UnreadableFile(f"zip record has the name {name[:80]!r}: no known writer uses such a name")


def data_offset(fd: int, layout: ZipLayout, record: ZipRecord) -> int:
    """Absolute offset of the record's bytes in the file; its local header is checked."""
    at = layout.base + record.header_offset
    header = LOCAL_HEADER.unpack(read_at(fd, at, LOCAL_HEADER.size))
    if header[0] != b"PK\x03\x04":
        raise UnreadableFile(f"zip record `{record.name}` has no local header at byte {at}")
    start = at + LOCAL_HEADER.size + int(header[9]) + int(header[10])
    if start + record.compressed_bytes > layout.base + layout.directory_offset:
        raise UnreadableFile(f"zip record `{record.name}` reaches into the directory")
    return start


def read_record(fd: int, layout: ZipLayout, record: ZipRecord, *, max_bytes: int) -> bytes:
    """The bytes of one record, inflated if it is compressed; raises `UnreadableFile` above `max_bytes`."""
    if record.size_bytes > max_bytes:
        raise UnreadableFile(f"zip record `{record.name}` has {record.size_bytes} bytes: at most {max_bytes} are read")
    start = data_offset(fd, layout, record)
    if record.stored:
        if record.size_bytes != record.compressed_bytes:
            raise UnreadableFile(f"zip record `{record.name}` is stored uncompressed, but its two sizes differ")
        return read_at(fd, start, record.size_bytes)
    if record.method != 8:
        raise UnreadableFile(f"zip record `{record.name}` uses compression method {record.method}: 0 and 8 are known")
    if record.size_bytes > MAX_DEFLATED_BYTES:
        raise UnreadableFile(
            f"zip record `{record.name}` inflates to {record.size_bytes} bytes: at most {MAX_DEFLATED_BYTES} are read"
        )
    return _inflate(read_at(fd, start, min(record.compressed_bytes, MAX_DEFLATED_BYTES)), record)


def _inflate(raw: bytes, record: ZipRecord) -> bytes:
    inflater = zlib.decompressobj(-15)
    try:
        data = inflater.decompress(raw, record.size_bytes + 1)
    except zlib.error as problem:
        raise UnreadableFile(f"zip record `{record.name}` cannot be inflated: {problem}") from None
    if len(data) != record.size_bytes:
        raise UnreadableFile(f"zip record `{record.name}` inflates to {len(data)} bytes instead of {record.size_bytes}")
    return data
