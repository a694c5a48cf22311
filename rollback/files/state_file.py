"""A state file of any format: read as a tree of values, and numbers in it replaced.

The content tells the format: torch zip, legacy stream, pickle, JSON, DCP entries. A safetensors file holds only tensors
and is refused here; `rollback.files.safetensors_file` checks its header.

Two ways to edit, both planned before a byte is written and both checked by reading the planned pickle again.
`plan_patch` overwrites constants of equal width and updates the CRCs. `write_edited_copy` makes a new file with a new
inode, in which constants may change width, and copies tensor bytes from file to file without holding them. A pickle
that changes its length is written behind the other records of the zip, so that tensors keep the place and the alignment
that `mmap` needs.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from rollback.disk import pread
from rollback.disk.durable import BytePatch, Piece, write_new
from rollback.errors import PlanRefused, UnreadableFile
from rollback.files.dcp_file import read_distcp_file
from rollback.files.edits import (
    Edits,
    NumberChange,
    WidthChanges,
    changes_of,
    compare,
    dotted,
    encode_any_width,
    encode_same_width,
)
from rollback.files.json_file import json_parts
from rollback.files.pickle_machine import Limits
from rollback.files.pickle_values import Encoding, NumberPlace
from rollback.files.torch_file import naming, open_state_file, read_torch_content, stored_number
from rollback.files.torch_tree import Container, PickleSegment, TorchFile
from rollback.files.torch_zip import (
    CHUNK_BYTES,
    LOCAL_HEADER,
    ZipLayout,
    data_offset,
    read_at,
)

_MAX_JSON_TREE_BYTES = 8 * 2**20  # in memory
_MAX_JSON_MEMBER = 4096  # bytes of text; numbers and names are what continues a run


def read_state_file(path: Path | str, *, limits: Limits | None = None) -> TorchFile:
    """Read the state file at `path`.

    Raises `UnreadableFile` for damage and for anything but a regular file, `UnknownFormat` for any other content.
    """
    path = Path(path)
    if path.suffix == ".distcp":
        return read_distcp_file(path)
    with open_state_file(path) as (fd, size_bytes), naming(path):
        if pread(fd, 1, 0) in (b"{", b"["):
            return _read_json(fd, path, size_bytes)
        return read_torch_content(fd, path, size_bytes, limits=limits)


def _read_json(fd: int, path: Path, size_bytes: int) -> TorchFile:
    """The members of the outermost object or list; long ones, such as the Trainer's `log_history`, are checked and dropped."""
    members: dict[str | int, object] = {}
    left = _MAX_JSON_TREE_BYTES
    for part in json_parts(fd, 0, size_bytes, wanted=lambda keys: len(keys) <= 1):
        length = part.end - part.start
        if not part.keys or length > _MAX_JSON_MEMBER:
            continue
        left -= 128 + part.num_bytes
        if left < 0:
            raise UnreadableFile(f"more than {len(members)} values at its top level: expected a file of counters")
        value = part.value
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = stored_number(value, NumberPlace(0, part.start, length, Encoding.JSON))
        members[part.keys[0]] = value
    tree = members if pread(fd, 1, 0) == b"{" else list(members.values())
    return TorchFile(path=path, container=Container.JSON, tree=tree, segments=(), size_bytes=size_bytes)


# --- Numbers in a state file replaced


def plan_patch(file: TorchFile, edits: Edits) -> tuple[BytePatch, ...]:
    """The byte patches that make `edits` in place, CRC fields included, ordered by offset.

    Raises PlanRefused when a value does not fit the width of the old one, or shares its bytes with a field that is
    not edited. Nothing is written. Widths: floats always fit, an integer fits as long as its opcode can hold it.
    """
    if file.container is Container.JSON:
        raise PlanRefused(f"`{file.path.name}` is text: it is not patched in place", "write an edited copy instead")
    changes = changes_of(file, edits)
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _patches(fd, file, changes)
    finally:
        os.close(fd)


def write_edited_copy(file: TorchFile, edits: Edits, destination: Path) -> None:
    """Write a copy of `file` with `edits` made to `destination`, which must not exist; mode kept, content fsynced.

    Raises PlanRefused as `plan_patch` does, except that widths may change where the file has one pickle.
    """
    changes = changes_of(file, edits)
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if file.container is Container.JSON:
            _write_patched(destination, file, tuple(_json_patches(fd, changes)), fd)
            return
        try:
            patches = _patches(fd, file, changes)
        except WidthChanges:
            pieces = list(_spliced(fd, file, changes))
            write_new(destination, file.path, pieces, fd)
        else:
            _write_patched(destination, file, patches, fd)
    finally:
        os.close(fd)


def _patches(fd: int, file: TorchFile, changes: list[NumberChange]) -> tuple[BytePatch, ...]:
    patches: dict[int, BytePatch] = {}
    touched: dict[tuple[int, str], list[BytePatch]] = {}
    for change in changes:
        segment = file.segments[change.place.segment]
        offset = _absolute(fd, segment, change.place)
        old = read_at(fd, offset, change.place.width)
        patch = BytePatch(offset, old, encode_same_width(change.value, old, change.place))
        patches[offset] = patch
        if segment.layout is not None:
            name = change.place.record if change.place.record is not None else _pickle_name(segment)
            touched.setdefault((change.place.segment, name), []).append(patch)
    _check_planned(fd, file, changes, patches.values())
    for (index, name), inside in touched.items():
        layout = file.segments[index].layout
        assert layout is not None
        for patch in _crc_patches(fd, layout, name, inside):
            patches[patch.offset] = patch
    return tuple(patch for _, patch in sorted(patches.items()) if patch.old != patch.new)


def _pickle_name(segment: PickleSegment) -> str:
    assert segment.record is not None
    return segment.record.name


def _absolute(fd: int, segment: PickleSegment, place: NumberPlace) -> int:
    if place.record is None:
        return segment.pickle_offset + place.offset
    if segment.layout is None:
        return place.offset
    record = segment.layout.find(place.record)
    assert record is not None
    return data_offset(fd, segment.layout, record) + place.offset


def _crc_patches(fd: int, layout: ZipLayout, name: str, inside: list[BytePatch]) -> Iterator[BytePatch]:
    record = layout.find(name)
    assert record is not None
    start = data_offset(fd, layout, record)
    old_crc, new_crc = _crc_before_and_after(fd, start, record.size_bytes, inside)
    if record.crc == 0 and old_crc != 0:
        return  # saved with torch.serialization.set_crc32_options(False): there are no checksums to mend
    new = struct.pack("<I", new_crc)
    header = layout.base + record.header_offset
    in_header = read_at(fd, header + 14, 4)
    if in_header != b"\0\0\0\0":
        yield BytePatch(header + 14, in_header, new)
    if record.flags & 8:
        at = start + record.compressed_bytes
        at += 4 if read_at(fd, at, 4) == b"PK\x07\x08" else 0
        yield BytePatch(at, read_at(fd, at, 4), new)
    entry = layout.base + record.entry_offset + 16
    yield BytePatch(entry, read_at(fd, entry, 4), new)


def _crc_before_and_after(fd: int, start: int, size_bytes: int, inside: list[BytePatch]) -> tuple[int, int]:
    before = after = 0
    for at in range(start, start + size_bytes, CHUNK_BYTES):
        old = read_at(fd, at, min(CHUNK_BYTES, start + size_bytes - at))
        # A patch may straddle two chunks: cut it to this one.
        new = bytearray(old)
        for patch in inside:
            low, high = max(patch.offset, at), min(patch.offset + len(patch.new), at + len(old))
            if low < high:
                new[low - at : high - at] = patch.new[low - patch.offset : high - patch.offset]
        before, after = zlib.crc32(old, before), zlib.crc32(new, after)
    return before, after


def _check_planned(fd: int, file: TorchFile, changes: list[NumberChange], patches: Iterable[BytePatch]) -> None:
    """Read every pickle as it will be and compare: what is edited has its value, what is not is as it was."""
    for index in {change.place.segment for change in changes}:
        segment = file.segments[index]
        data = bytearray(read_at(fd, segment.pickle_offset, segment.pickle_bytes))
        before = bytes(data)
        for patch in patches:
            at = patch.offset - segment.pickle_offset
            if 0 <= at < len(data):
                data[at : at + len(patch.new)] = patch.new
        inside = [c for c in changes if c.place.segment == index]
        compare(file, before, bytes(data), inside, depth=len(segment.keys))


def _spliced(fd: int, file: TorchFile, changes: list[NumberChange]) -> Iterator[Piece]:
    if file.container is Container.DCP or len(file.segments) != 1:
        raise PlanRefused(
            f"`{file.path.name}`: the new value needs more or fewer bytes, which a `.distcp` file does not allow"
        )
    segment = file.segments[0]
    old = read_at(fd, segment.pickle_offset, segment.pickle_bytes)
    new = _spliced_pickle(old, segment, [c for c in changes if c.place.record is None])
    compare(file, old, new, changes)
    elsewhere = [c for c in changes if c.place.record is not None]
    if elsewhere:
        raise PlanRefused(
            f"`{file.path.name}`: {dotted(elsewhere[0].keys)} is a tensor and cannot change together with a value "
            "that changes its width",
            "make the two edits one after the other",
        )
    if segment.layout is None:
        yield new
        yield range(segment.pickle_bytes, file.size_bytes)
    else:
        yield from spliced_zip(fd, segment, segment.layout, new, file.size_bytes)


def _spliced_pickle(old: bytes, segment: PickleSegment, changes: list[NumberChange]) -> bytes:
    parts: list[bytes] = []
    at = 0
    grown: list[tuple[int, int]] = []  # (offset, bytes gained)
    for change in sorted(changes, key=lambda c: c.place.offset):
        place = change.place
        if place.offset < at:
            continue  # the same stored number by another path
        constant = old[place.offset : place.offset + place.width]
        try:
            new = encode_same_width(change.value, constant, place)
        except WidthChanges:
            new = encode_any_width(change.value, constant, place)
        parts += [old[at : place.offset], new]
        at = place.offset + place.width
        grown.append((place.offset, len(new) - place.width))
    spliced = bytearray(b"".join(parts) + old[at:])
    for frame in segment.frames:
        gained = sum(gain for offset, gain in grown if frame.start <= offset < frame.start + frame.length)
        moved = sum(gain for offset, gain in grown if offset < frame.start)
        struct.pack_into("<Q", spliced, frame.start + moved - 8, frame.length + gained)
    return bytes(spliced)


def _json_patches(fd: int, changes: list[NumberChange]) -> Iterator[BytePatch]:
    """Numbers replaced where they stand, whatever their width: layout and everything else stay."""
    for change in sorted(changes, key=lambda c: c.place.offset):
        old = read_at(fd, change.place.offset, change.place.width)
        yield BytePatch(change.place.offset, old, json.dumps(change.value).encode())


def _write_patched(destination: Path, file: TorchFile, patches: tuple[BytePatch, ...], fd: int) -> None:
    pieces: list[Piece] = []
    at = 0
    for patch in patches:
        pieces += [range(at, patch.offset), patch.new]
        at = patch.offset + len(patch.old)
    write_new(destination, file.path, [*pieces, range(at, file.size_bytes)], fd)


# --- A torch zip whose pickle changes its length

_HAS_DESCRIPTOR = 8  # flag: sizes and CRC stand behind the record
_FULL32 = 0xFFFFFFFF


def spliced_zip(fd: int, segment: PickleSegment, layout: ZipLayout, new: bytes, size_bytes: int) -> Iterator[Piece]:
    """The whole file with `new` as its pickle record, behind the others: these keep their places, the old one is dead bytes."""
    record = segment.record
    assert record is not None
    at = layout.directory_offset
    if at + len(new) >= _FULL32:
        raise PlanRefused(f"zip record `{record.name}` would lie behind 4 GiB, which its zip entry cannot record")
    crc = 0 if all(one.crc == 0 for one in layout.records) else zlib.crc32(new)
    fields = list(LOCAL_HEADER.unpack(read_at(fd, record.header_offset, LOCAL_HEADER.size)))
    name = read_at(fd, record.header_offset + LOCAL_HEADER.size, fields[9])
    fields[2] &= ~_HAS_DESCRIPTOR
    fields[6:9] = crc, len(new), len(new)
    fields[10] = 0  # without what aligned the old record
    header = LOCAL_HEADER.pack(*fields) + name
    directory = bytearray(read_at(fd, at, layout.directory_bytes))
    entry = record.entry_offset - at
    flags = struct.unpack_from("<H", directory, entry + 8)[0]
    struct.pack_into("<H", directory, entry + 8, flags & ~_HAS_DESCRIPTOR)
    struct.pack_into("<III", directory, entry + 16, crc, len(new), len(new))
    struct.pack_into("<I", directory, entry + 42, at)
    behind = at + layout.directory_bytes
    yield range(at)
    yield header + new + bytes(directory)
    yield _end_records(read_at(fd, behind, size_bytes - behind), len(header) + len(new))


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
