"""Opcodes that push numbers, text and bytes. A number keeps the place of its bytes; integers are bounded."""

from __future__ import annotations

import struct

from rollback.files.globals import RawBytes
from rollback.files.pickle_machine import PLACED_INT_BYTES, Machine, Opcode
from rollback.files.pickle_values import Encoding, Place, StoredFloat, StoredInt

MAX_INT_BYTES = 64  # larger integers are no counters, and printing them is quadratic
BYTES_BYTES = 400  # a bytes literal that knows its place, beside its content
_U16, _I32, _U32, _U64, _F64 = (struct.Struct(f) for f in ("<H", "<i", "<I", "<Q", ">d"))


def none(m: Machine) -> None:
    m.stack.append(None)


def true(m: Machine) -> None:
    m.stack.append(True)


def false(m: Machine) -> None:
    m.stack.append(False)


# --- numbers


def push_int(m: Machine, value: int, start: int) -> None:
    m.spend(PLACED_INT_BYTES)
    number = int.__new__(StoredInt, value)
    number.at = m.segment | start << 16 | (m.pos - start)
    m.stack.append(number)


def binint1(m: Machine) -> None:
    start = m.pos - 1
    value = m.data[m.pos]
    m.pos += 1
    push_int(m, value, start)


def binint2(m: Machine) -> None:
    start = m.pos - 1
    push_int(m, m.number(_U16), start)


def binint(m: Machine) -> None:
    start = m.pos - 1
    push_int(m, m.number(_I32), start)


def long1(m: Machine) -> None:
    start = m.pos - 1
    push_int(m, _long(m, m.take(1)[0]), start)


def long4(m: Machine) -> None:
    start = m.pos - 1
    push_int(m, _long(m, m.number(_I32)), start)


def _long(m: Machine, count: int) -> int:
    if not 0 <= count <= MAX_INT_BYTES:
        raise m.damage(f"an integer of {count} bytes: at most {MAX_INT_BYTES} are read")
    return int.from_bytes(m.take(count), "little", signed=True)


def text_int(m: Machine) -> None:
    start = m.pos - 1
    text = m.line().rstrip(b"L")
    if text in (b"00", b"01"):
        m.stack.append(text == b"01")
        return
    digits = text.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > 2 * MAX_INT_BYTES:
        raise m.damage(f"{text[:20]!r} is no integer")
    push_int(m, int(text), start)


def binfloat(m: Machine) -> None:
    start = m.pos - 1
    number = float.__new__(StoredFloat, _F64.unpack(m.take(8))[0])
    number.at = m.segment | start << 16 | 9
    m.left -= 48
    m.stack.append(number)


def text_float(m: Machine) -> None:
    start = m.pos - 1
    text = m.line()
    try:
        number = float.__new__(StoredFloat, float(text))
    except ValueError:
        raise m.damage(f"{text[:20]!r} is no float") from None
    number.at = m.spot(start)
    m.left -= 48
    m.stack.append(number)


# --- text and bytes


def _push_text(m: Machine, start: int, count: int) -> None:
    raw = m.take(count)
    m.spend(count if raw.isascii() else 5 * count)  # one wide character makes all of them wide
    m.stack.append(raw.decode("utf-8", "surrogatepass"))
    m.texts = (m.texts[1], start)


def binunicode(m: Machine) -> None:
    start = m.pos - 1
    _push_text(m, start, m.number(_U32))


def short_binunicode(m: Machine) -> None:
    start = m.pos - 1
    _push_text(m, start, m.take(1)[0])


def binunicode8(m: Machine) -> None:
    start = m.pos - 1
    _push_text(m, start, m.number(_U64))


def unicode_line(m: Machine) -> None:
    m.stack.append(m.line().decode("raw-unicode-escape"))


def string_line(m: Machine) -> None:
    text = m.line()
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in b"'\"":
        raise m.damage("a quoted string without its quotes")
    m.stack.append(text[1:-1].decode("latin1"))


def binstring(m: Machine) -> None:
    count = m.number(_I32)
    if count < 0:
        raise m.damage("a string of negative length")
    _push_string(m, count)


def short_binstring(m: Machine) -> None:
    _push_string(m, m.take(1)[0])


def _push_string(m: Machine, count: int) -> None:
    raw = m.take(count)
    m.spend(count)
    m.stack.append(raw.decode("latin1"))


def _push_bytes(m: Machine, start: int, count: int) -> None:
    chunk = m.take(count)
    m.spend(BYTES_BYTES + 2 * count)
    raw = RawBytes(chunk)
    raw.place = m.place(start)
    m.stack.append(raw)


def short_binbytes(m: Machine) -> None:
    start = m.pos - 1
    _push_bytes(m, start, m.take(1)[0])


def binbytes(m: Machine) -> None:
    start = m.pos - 1
    _push_bytes(m, start, m.number(_U32))


def binbytes8(m: Machine) -> None:
    start = m.pos - 1
    _push_bytes(m, start, m.number(_U64))


def text_place(m: Machine, text: str) -> Place | None:
    """The place of the literal `text` if it is one of the last two that were read, else None."""
    encoded = text.encode("utf-8", "surrogatepass")
    literal = b"X" + _U32.pack(len(encoded)) + encoded
    for start in m.texts:
        if start >= 0 and m.data.startswith(literal, start):
            return Place(m.segment >> 64, start, len(literal), Encoding.LATIN1)
    return None


CONSTANT_OPCODES: dict[str, Opcode] = {
    "N": none, "\x88": true, "\x89": false,
    "K": binint1, "M": binint2, "J": binint, "\x8a": long1, "\x8b": long4, "I": text_int, "L": text_int,
    "G": binfloat, "F": text_float,
    "X": binunicode, "\x8c": short_binunicode, "\x8d": binunicode8, "V": unicode_line, "S": string_line,
    "T": binstring, "U": short_binstring, "C": short_binbytes, "B": binbytes, "\x8e": binbytes8,
}  # fmt: skip
