"""Protobuf's wire format, as far as logs need it: the fields of one message. No schema, no protobuf package.

Format: protobuf.dev/programming-guides/encoding. A field is a key (number and wire type) and its content; a message inside is
bytes that `fields_of` reads again.
"""

from __future__ import annotations

from collections.abc import Iterator

VARINT, FIXED_64, BYTES, FIXED_32 = 0, 1, 2, 5

Field = tuple[int, int, bytes | int]


def fields_of(data: bytes) -> Iterator[Field]:
    """Yield (number, wire type, value) of every field; raises ValueError or IndexError where the message is damaged."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield number, kind, value
            continue
        if kind == BYTES:
            size, at = _varint(data, at)
        elif kind in (FIXED_64, FIXED_32):
            size = 8 if kind == FIXED_64 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + size > len(data):
            raise ValueError("field runs past its message")
        yield number, kind, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("varint too long")
