"""Constants of a pickle written again: with the width and opcode of the old one, or as wide as they need to be. Pure."""

from __future__ import annotations

import struct

from rollback.errors import PlanRefused
from rollback.files.number_bytes import encode_number
from rollback.files.pickle_values import Encoding, Place


class WidthChanges(PlanRefused):
    """A value needs more bytes than the old one has."""


def encode_any_width(value: int | float, old: bytes, place: Place) -> bytes:
    """The bytes of `value` at `place`, as wide as they need to be."""
    if place.encoding is Encoding.LATIN1:
        text = encode_number(value, place.dtype).decode("latin1").encode("utf-8")
        return b"X" + struct.pack("<I", len(text)) + text
    if place.encoding is Encoding.RAW:
        raw = encode_number(value, place.dtype)
        return raw if place.record is not None else old[: len(old) - len(raw)] + raw
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    for opcode, layout in ((b"K", "<B"), (b"M", "<H"), (b"J", "<i")):
        try:
            return opcode + struct.pack(layout, value)
        except struct.error:
            continue
    count = value.bit_length() // 8 + 1
    if count > 255:
        raise PlanRefused(f"{value!r} is no counter: integers of up to 255 bytes can be stored")
    return b"\x8a" + bytes([count]) + value.to_bytes(count, "little", signed=True)


def encode_same_width(value: int | float, old: bytes, place: Place) -> bytes:
    """The bytes of `value` with the width and, for integers, the opcode of `old`; raises when it does not fit."""
    new = encode_any_width(value, old, place)
    if place.encoding is Encoding.OPCODE and isinstance(value, int):
        new = _same_opcode(value, old) or new
    if len(new) != len(old):
        raise WidthChanges(
            f"{value!r} needs {len(new)} bytes where {len(old)} are: it does not fit in place",
            "write an edited copy instead of a patch",
        )
    return new


def _same_opcode(value: int, old: bytes) -> bytes | None:
    opcode = old[:1]
    try:
        if opcode in (b"K", b"M", b"J"):
            return opcode + struct.pack({b"K": "<B", b"M": "<H", b"J": "<i"}[opcode], value)
        if opcode == b"\x8a":
            return old[:2] + value.to_bytes(old[1], "little", signed=True)
    except (struct.error, OverflowError):
        return None
    return None
