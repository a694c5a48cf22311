"""The stack machine that reads pickles, with its limits, and the opcodes for memo, framing, numbers, text and bytes.

Opcodes for containers and calls are in `rollback.files.pickle_reader`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from rollback.errors import UnreadableFile
from rollback.files.pickle_values import Encoding, NumberPlace, RawBytes, StoredFloat, StoredInt, TensorRef

MAX_LINE = 4096  # bytes of a text argument (protocol 0) or of a module name
OPCODE_BYTES = 64  # charged per opcode: a small object and its stack slots; about half a microsecond of time
PLACED_INT_BYTES = 256  # extra cost of an int that knows its place

Opcode: TypeAlias = "Callable[[Machine], None]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much memory one pickle may take, bytes and values together, estimated opcode by opcode."""

    num_bytes: int = 48 * 2**20

    def less(self, num_bytes: int) -> Limits:
        """The limit that remains after `num_bytes`; `UnreadableFile` when they exceed it."""
        if num_bytes > self.num_bytes:
            raise UnreadableFile(f"reading it would take more than {self.num_bytes >> 20} MB of memory")
        return Limits(num_bytes=self.num_bytes - num_bytes)

    @classmethod
    def for_file(cls, disk_bytes: int) -> Limits:
        """The limit for a file of `disk_bytes` on disk: tensors of 25 kB and more get about three kilobytes each."""
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
    """Position, stack, memo and memory budget of one reading. Errors are `UnreadableFile` with the byte position."""

    __slots__ = ("data", "frames", "globals", "left", "limits", "memo", "pos", "segment", "stack", "tensors", "texts")

    def __init__(self, data: bytes, start: int, segment: int, limits: Limits) -> None:
        self.data = data
        self.pos = start
        self.segment = segment << 64  # packed as in `StoredInt.at`
        self.limits = limits
        self.left = limits.num_bytes
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}
        self.frames: list[Frame] = []
        self.tensors: list[TensorRef] = []
        self.globals: set[str] = set()
        self.texts = (-1, -1)  # starts of the last two text literals (protocol 2 writes bytes as text)

    # --- the budget

    def damage(self, what: str) -> UnreadableFile:
        """The error for this position; `what` says what is wrong."""
        return UnreadableFile(f"pickle at byte {self.pos}: {what}")

    def spend(self, num_bytes: int) -> None:
        """Charge memory before it is allocated; `UnreadableFile` when the budget is spent."""
        self.left -= num_bytes
        if self.left < 0:
            raise self.damage(
                f"its values would take more than {self.limits.num_bytes >> 20} MB of memory: no state file of this size does"
            )

    # --- the stream

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        end = self.pos + count
        chunk = self.data[self.pos : end]
        if len(chunk) != count:
            raise PickleEndsEarly(f"pickle wants {count} bytes at {self.pos}, the data ends at {len(self.data)}")
        self.pos = end
        return chunk

    def line(self) -> bytes:
        """The bytes up to the next newline, which is skipped."""
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
        """The next integer or float, unpacked with `layout`."""
        value: int = layout.unpack(self.take(layout.size))[0]
        return value

    # --- places

    def spot(self, start: int) -> int:
        """The place of the constant from `start` to here, packed."""
        return self.segment | start << 16 | (self.pos - start)

    def place(self, start: int) -> NumberPlace:
        """The place of the constant from `start` to here."""
        return NumberPlace(self.segment >> 64, start, self.pos - start, Encoding.OPCODE)

    def unplaced(self, values: list[object]) -> list[object]:
        """The values with placed ints replaced by plain ones: for tuples, which hold shapes and strides by the 100,000."""
        for index, value in enumerate(values):
            if type(value) is StoredInt:
                self.left += PLACED_INT_BYTES
                values[index] = int(value)
        return values

    # --- the stack

    def pop(self) -> object:
        """Remove and return the top value."""
        value = self.stack.pop()
        if value is MARK:
            raise self.damage("a mark is used as a value")
        return value

    def top(self) -> object:
        """The top value, left on the stack."""
        value = self.stack[-1]
        if value is MARK:
            raise self.damage("a mark is used as a value")
        return value

    def pop_to_mark(self) -> list[object]:
        """Remove and return the values above the topmost mark, and the mark."""
        stack = self.stack
        for index in range(len(stack) - 1, -1, -1):
            if stack[index] is MARK:
                items = stack[index + 1 :]
                del stack[index:]
                return items
        raise self.damage("no mark on the stack")


# --- Opcodes: numbers, text, bytes

_MAX_INT_BYTES = 64  # no counter is larger, and printing takes quadratic time
_BYTES_BYTES = 400  # cost of a bytes literal that knows its place, without its content
_U8, _U16, _I32, _U32, _U64, _F64 = (struct.Struct(f) for f in ("<B", "<H", "<i", "<I", "<Q", ">d"))


def _constant(value: object) -> Opcode:
    """The opcode that pushes this value."""

    def push(m: Machine) -> None:
        m.stack.append(value)

    return push


def _literal(layout: struct.Struct, push: Callable[[Machine, int, int], None]) -> Opcode:
    """The opcode with a number of this layout behind it; `push` is given where the opcode began, and the number."""

    def execute(m: Machine) -> None:
        start = m.pos - 1
        push(m, start, m.number(layout))

    return execute


# --- numbers


def _push_int(m: Machine, start: int, value: int) -> None:
    """Push `value`, whose opcode began at `start`, as an int that knows its place."""
    m.spend(PLACED_INT_BYTES)
    number = int.__new__(StoredInt, value)
    number.at = m.segment | start << 16 | (m.pos - start)
    m.stack.append(number)


def _op_binint1(m: Machine) -> None:
    start = m.pos - 1
    value = m.data[m.pos]
    m.pos += 1
    _push_int(m, start, value)


def _push_long(m: Machine, start: int, count: int) -> None:
    if not 0 <= count <= _MAX_INT_BYTES:
        raise m.damage(f"an integer of {count} bytes: at most {_MAX_INT_BYTES} are read")
    _push_int(m, start, int.from_bytes(m.take(count), "little", signed=True))


def _op_text_int(m: Machine) -> None:
    start = m.pos - 1
    text = m.line().rstrip(b"L")
    if text in (b"00", b"01"):
        m.stack.append(text == b"01")
        return
    digits = text.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > 2 * _MAX_INT_BYTES:
        raise m.damage(f"{text[:20]!r} is no integer")
    _push_int(m, start, int(text))


def _op_binfloat(m: Machine) -> None:
    start = m.pos - 1
    number = float.__new__(StoredFloat, _F64.unpack(m.take(8))[0])
    number.at = m.segment | start << 16 | 9
    m.left -= 48
    m.stack.append(number)


def _op_text_float(m: Machine) -> None:
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


def _op_unicode_line(m: Machine) -> None:
    m.stack.append(m.line().decode("raw-unicode-escape"))


def _op_string_line(m: Machine) -> None:
    text = m.line()
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in b"'\"":
        raise m.damage("a quoted string without its quotes")
    m.stack.append(text[1:-1].decode("latin1"))


def _push_string(m: Machine, _start: int, count: int) -> None:
    if count < 0:
        raise m.damage("a string of negative length")
    raw = m.take(count)
    m.spend(count)
    m.stack.append(raw.decode("latin1"))


def _push_bytes(m: Machine, start: int, count: int) -> None:
    chunk = m.take(count)
    m.spend(_BYTES_BYTES + 2 * count)
    raw = RawBytes(chunk)
    raw.place = m.place(start)
    m.stack.append(raw)


def text_place(m: Machine, text: str) -> NumberPlace | None:
    """The place of the literal `text` if it is one of the last two that were read, else None."""
    encoded = text.encode("utf-8", "surrogatepass")
    literal = b"X" + _U32.pack(len(encoded)) + encoded
    for start in m.texts:
        if start >= 0 and m.data.startswith(literal, start):
            return NumberPlace(m.segment >> 64, start, len(literal), Encoding.LATIN1)
    return None


CONSTANT_OPCODES: dict[str, Opcode] = {
    "N": _constant(None), "\x88": _constant(True), "\x89": _constant(False),
    "K": _op_binint1, "M": _literal(_U16, _push_int), "J": _literal(_I32, _push_int),
    "\x8a": _literal(_U8, _push_long), "\x8b": _literal(_I32, _push_long),
    "I": _op_text_int, "L": _op_text_int, "G": _op_binfloat, "F": _op_text_float,
    "X": _literal(_U32, _push_text), "\x8c": _literal(_U8, _push_text), "\x8d": _literal(_U64, _push_text),
    "V": _op_unicode_line, "S": _op_string_line,
    "T": _literal(_I32, _push_string), "U": _literal(_U8, _push_string),
    "C": _literal(_U8, _push_bytes), "B": _literal(_U32, _push_bytes), "\x8e": _literal(_U64, _push_bytes),
}  # fmt: skip


# --- Opcodes: memo, framing, stack

_MEMO_BYTES = 64


def _remember(m: Machine, index: int) -> None:
    m.spend(_MEMO_BYTES)
    m.memo[index] = _shared(m.top())


def _shared(value: object) -> object:
    """The value to keep in the memo: a number without its place, because an edit of one use would change the others."""
    return int(value) if type(value) is StoredInt else value


def _op_binput(m: Machine) -> None:
    index = m.data[m.pos]
    m.pos += 1
    _remember(m, index)


def _op_long_binput(m: Machine) -> None:
    _remember(m, m.number(_U32))


def _op_put(m: Machine) -> None:
    _remember(m, _line_index(m))


def _op_memoize(m: Machine) -> None:
    _remember(m, len(m.memo))


def _op_binget(m: Machine) -> None:
    index = m.data[m.pos]
    m.pos += 1
    m.stack.append(m.memo[index])


def _op_long_binget(m: Machine) -> None:
    m.stack.append(m.memo[m.number(_U32)])


def _op_get(m: Machine) -> None:
    m.stack.append(m.memo[_line_index(m)])


def _line_index(m: Machine) -> int:
    text = m.line()
    if not text.isdigit() or len(text) > 10:
        raise m.damage(f"{text[:20]!r} is no memo index")
    return int(text)


def _op_proto(m: Machine) -> None:
    version = m.take(1)[0]
    if version > 5:
        raise m.damage(f"protocol {version}: protocols 0 to 5 are known")


def _op_frame(m: Machine) -> None:
    length = m.number(_U64)
    if m.pos + length > len(m.data):
        raise PickleEndsEarly(f"pickle frame of {length} bytes at {m.pos} is longer than the data")
    m.frames.append(Frame(start=m.pos, length=length))


def _op_discard(m: Machine) -> None:
    m.stack.pop()


def _op_dup(m: Machine) -> None:
    m.stack.append(_shared(m.top()))


def _op_pop_mark(m: Machine) -> None:
    m.pop_to_mark()


MEMO_OPCODES: dict[str, Opcode] = {
    "q": _op_binput, "r": _op_long_binput, "p": _op_put, "\x94": _op_memoize, "h": _op_binget, "j": _op_long_binget,
    "g": _op_get, "\x80": _op_proto, "\x95": _op_frame, "0": _op_discard, "2": _op_dup, "1": _op_pop_mark,
}  # fmt: skip
