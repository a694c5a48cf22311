"""The stack machine that reads pickles, with its limits, and the opcodes for memo, framing, numbers, text and bytes.

Opcodes for containers and calls are in `rollback.files.pickle_reader`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from rollback.errors import UnreadableFile
from rollback.files.pickle_values import Encoding, Place, RawBytes, StoredFloat, StoredInt, TensorRef

MAX_LINE = 4096  # bytes of a text argument (protocol 0) or of a module name
OPCODE_BYTES = 64  # what one opcode may take: a small object and its places on the stack; half a microsecond too
PLACED_INT_BYTES = 256  # an int that knows its place takes that much more

Opcode: TypeAlias = "Callable[[Machine], None]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one pickle may take in memory, bytes and values together, as estimated opcode by opcode."""

    num_bytes: int = 48 * 2**20

    def less(self, num_bytes: int) -> Limits:
        """What is left once so many bytes are taken; UnreadableFile when they are too many."""
        if num_bytes > self.num_bytes:
            raise UnreadableFile(f"reading it would take more than {self.num_bytes >> 20} MB of memory")
        return Limits(num_bytes=self.num_bytes - num_bytes)

    @classmethod
    def for_file(cls, disk_bytes: int) -> Limits:
        """More for a file that takes much room on disk: some three kilobytes a tensor, of 25 kilobytes at least."""
        return cls(num_bytes=cls().num_bytes + min(disk_bytes // 8, 2**30))


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A protocol 4 frame: `start` is the first framed byte, its 8-byte length lies just before it."""

    start: int
    length: int


class PickleEndsEarly(UnreadableFile):
    """The bytes ended before the STOP opcode: damage, or a window that was too small."""


class _Mark:
    __slots__ = ()


MARK = _Mark()


class Machine:
    """Position, stack and memo of one reading. What breaks a rule raises UnreadableFile with the byte position."""

    __slots__ = ("data", "frames", "globals", "left", "limits", "memo", "pos", "segment", "stack", "tensors", "texts")

    def __init__(self, data: bytes, start: int, segment: int, limits: Limits) -> None:
        self.data = data
        self.pos = start
        self.segment = segment << 64  # as `StoredInt.at` wants it
        self.limits = limits
        self.left = limits.num_bytes
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}
        self.frames: list[Frame] = []
        self.tensors: list[TensorRef] = []
        self.globals: set[str] = set()
        self.texts = (-1, -1)  # starts of the last two text literals: bytes as text come with their encoding's name

    # --- the budget

    def damage(self, what: str) -> UnreadableFile:
        return UnreadableFile(f"pickle at byte {self.pos}: {what}")

    def spend(self, num_bytes: int) -> None:
        """Pay for memory before it is taken."""
        self.left -= num_bytes
        if self.left < 0:
            raise self.damage(
                f"its values would take more than {self.limits.num_bytes >> 20} MB of memory: no state file of this size does"
            )

    # --- the stream

    def take(self, count: int) -> bytes:
        end = self.pos + count
        chunk = self.data[self.pos : end]
        if len(chunk) != count:
            raise PickleEndsEarly(f"pickle wants {count} bytes at {self.pos}, the data ends at {len(self.data)}")
        self.pos = end
        return chunk

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.pos, self.pos + MAX_LINE)
        if end < 0:
            if self.pos + MAX_LINE > len(self.data):
                raise PickleEndsEarly(f"pickle line at {self.pos} has no end")
            raise self.damage(f"a line is longer than {MAX_LINE} bytes")
        chunk = self.data[self.pos : end]
        self.pos = end + 1
        self.left -= len(chunk)
        return chunk

    def number(self, layout: struct.Struct) -> int:
        value: int = layout.unpack(self.take(layout.size))[0]
        return value

    # --- places

    def spot(self, start: int) -> int:
        """The place of the constant from `start` to here, packed."""
        return self.segment | start << 16 | (self.pos - start)

    def place(self, start: int) -> Place:
        return Place(self.segment >> 64, start, self.pos - start, Encoding.OPCODE)

    def unplaced(self, values: list[object]) -> list[object]:
        """The same values, numbers inside tuples as plain ones: shapes and strides are such, by the hundred thousand."""
        for index, value in enumerate(values):
            if type(value) is StoredInt:
                self.left += PLACED_INT_BYTES
                values[index] = int(value)
        return values

    # --- the stack

    def pop(self) -> object:
        value = self.stack.pop()
        if value is MARK:
            raise self.damage("a mark is used as a value")
        return value

    def top(self) -> object:
        value = self.stack[-1]
        if value is MARK:
            raise self.damage("a mark is used as a value")
        return value

    def pop_to_mark(self) -> list[object]:
        stack = self.stack
        for index in range(len(stack) - 1, -1, -1):
            if stack[index] is MARK:
                items = stack[index + 1 :]
                del stack[index:]
                return items
        raise self.damage("no mark on the stack")


# --- Opcodes: numbers, text, bytes

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


# --- Opcodes: memo, framing, stack

MEMO_BYTES = 64


def _remember(m: Machine, index: int) -> None:
    m.spend(MEMO_BYTES)
    m.memo[index] = _shared(m.top())


def _shared(value: object) -> object:
    """A value that will be there more than once; a number has one place, so the second is a plain one."""
    return int(value) if type(value) is StoredInt else value


def binput(m: Machine) -> None:
    index = m.data[m.pos]
    m.pos += 1
    _remember(m, index)


def long_binput(m: Machine) -> None:
    _remember(m, m.number(_U32))


def put(m: Machine) -> None:
    _remember(m, _line_index(m))


def memoize(m: Machine) -> None:
    _remember(m, len(m.memo))


def binget(m: Machine) -> None:
    index = m.data[m.pos]
    m.pos += 1
    m.stack.append(m.memo[index])


def long_binget(m: Machine) -> None:
    m.stack.append(m.memo[m.number(_U32)])


def get(m: Machine) -> None:
    m.stack.append(m.memo[_line_index(m)])


def _line_index(m: Machine) -> int:
    text = m.line()
    if not text.isdigit() or len(text) > 10:
        raise m.damage(f"{text[:20]!r} is no memo index")
    return int(text)


def proto(m: Machine) -> None:
    version = m.take(1)[0]
    if version > 5:
        raise m.damage(f"protocol {version}: protocols 0 to 5 are known")


def frame(m: Machine) -> None:
    length = m.number(_U64)
    if m.pos + length > len(m.data):
        raise PickleEndsEarly(f"pickle frame of {length} bytes at {m.pos} is longer than the data")
    m.frames.append(Frame(start=m.pos, length=length))


def discard(m: Machine) -> None:
    m.stack.pop()


def dup(m: Machine) -> None:
    m.stack.append(_shared(m.top()))


def pop_mark(m: Machine) -> None:
    m.pop_to_mark()


MEMO_OPCODES: dict[str, Opcode] = {
    "q": binput, "r": long_binput, "p": put, "\x94": memoize, "h": binget, "j": long_binget, "g": get,
    "\x80": proto, "\x95": frame, "0": discard, "2": dup, "1": pop_mark,
}  # fmt: skip
