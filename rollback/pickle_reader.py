"""A pickle read opcode by opcode into plain values: a stack machine that can build, but cannot import or call.

The opcodes and their arguments are those of Python's `pickletools` (protocols 0 to 5). Three things differ from an
unpickler: a GLOBAL stays a name, a REDUCE stays a description (`rollback.pickle_globals` knows the few that matter),
and every number keeps the place of its bytes. Reading is bounded: by opcodes, by nesting where hashing recurses, by
the size of integers. Whatever breaks a rule raises UnreadableFile; nothing else may escape.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from rollback.errors import UnreadableFile
from rollback.pickle_globals import RawBytes, build_state, reduce_global, storage_from_persistent_id
from rollback.pickle_values import Encoding, Global, Opaque, Place, StorageRef, StoredFloat, StoredInt, TensorRef

MAX_LINE = 4096  # bytes of a text argument (protocol 0) or of a module name
MAX_PLACED_INTS = 200_000  # an int that knows its place takes 340 bytes; further ones are read, but not editable
MAX_INT_BYTES = 64  # larger integers are no counters, and printing them is quadratic
MAX_KEY_DEPTH = 8  # hashing a tuple recurses in C, without a check of depth


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one pickle may cost before it is refused: bytes of the record, opcodes executed (about a microsecond each)."""

    num_bytes: int = 96 * 2**20
    num_opcodes: int = 1_000_000

    @classmethod
    def for_file(cls, size_bytes: int) -> Limits:
        """A file of many tensors may have a long pickle: some 25 opcodes a tensor, of a few kilobytes at least."""
        return cls(num_opcodes=min(20_000_000, cls().num_opcodes + size_bytes // 2000))


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A protocol 4 frame: `start` is the first framed byte, its 8-byte length lies just before it."""

    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PickleContent:
    """One pickle: its value, where it ends, its frames, the tensors and the globals it names."""

    value: object
    end: int
    frames: tuple[Frame, ...]
    tensors: tuple[TensorRef, ...]
    globals: frozenset[str]


class PickleEndsEarly(UnreadableFile):
    """The bytes ended before the STOP opcode: damage, or a window that was too small."""


def read_pickle(data: bytes, *, start: int = 0, segment: int = 0, limits: Limits | None = None) -> PickleContent:
    """Read the pickle that starts at `start`; places are offsets into `data` and carry `segment`.

    Raises UnreadableFile with the byte position of what is wrong.
    """
    machine = _Machine(data, start, segment, limits or Limits())
    collecting = gc.isenabled()
    gc.disable()  # a pickle only builds: the collector would walk all of it again and again
    try:
        return machine.run()
    finally:
        if collecting:
            gc.enable()


class _Mark:
    __slots__ = ()


_MARK = _Mark()
_U16, _I32, _U32, _U64, _F64 = (struct.Struct(f) for f in ("<H", "<i", "<I", "<Q", ">d"))


class _Machine:
    """The stack machine; one method an opcode, found through `_TABLE`."""

    _TABLE: ClassVar[list[Callable[[_Machine], None] | None]] = [None] * 256

    def __init__(self, data: bytes, start: int, segment: int, limits: Limits) -> None:
        self.data = data
        self.pos = start
        self.segment = segment
        self.limits = limits
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}
        self.frames: list[Frame] = []
        self.tensors: list[TensorRef] = []
        self.globals: set[str] = set()
        self.charged = 0
        self.placed = 0
        self.texts = (-1, -1)  # starts of the last two text literals: bytes as text come with their encoding's name

    def run(self) -> PickleContent:
        data, table, budget = self.data, self._TABLE, self.limits.num_opcodes
        try:
            while True:
                opcode = data[self.pos]
                self.pos += 1
                if opcode == 0x2E:  # STOP
                    break
                method = table[opcode]
                if method is None:
                    raise self.damage(f"unknown opcode {opcode:#04x}")
                method(self)
                budget -= 1
                if budget < 0:
                    raise self.damage(f"more than {self.limits.num_opcodes} opcodes")
            return self.finish()
        except IndexError:
            if self.pos >= len(data):
                raise PickleEndsEarly(f"pickle ends at byte {len(data)} before its STOP opcode") from None
            raise self.damage("an opcode finds no operand on the stack") from None
        except KeyError as problem:
            raise self.damage(f"memo entry {problem} is read before it is written") from None
        except UnicodeDecodeError:
            raise self.damage("a string is not UTF-8") from None

    def finish(self) -> PickleContent:
        value = self.pop()
        if self.stack:
            raise self.damage(f"{len(self.stack)} values are left on the stack at STOP")
        return PickleContent(
            value=value,
            end=self.pos,
            frames=tuple(self.frames),
            tensors=tuple(self.tensors),
            globals=frozenset(self.globals),
        )

    # --- reading the stream

    def damage(self, what: str) -> UnreadableFile:
        return UnreadableFile(f"pickle at byte {self.pos}: {what}")

    def charge(self, units: int) -> None:
        """Pay for work that one opcode can multiply; the budget is that of the opcodes."""
        self.charged += units
        if self.charged > self.limits.num_opcodes:
            raise self.damage("values are copied too often for a checkpoint")

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
        return chunk

    def number(self, layout: struct.Struct) -> int:
        value: int = layout.unpack(self.take(layout.size))[0]
        return value

    def place(self, start: int) -> Place:
        return Place(self.segment, start, self.pos - start, Encoding.OPCODE)

    # --- the stack

    def pop(self) -> object:
        value = self.stack.pop()
        if value is _MARK:
            raise self.damage("a mark is used as a value")
        return value

    def top(self) -> object:
        value = self.stack[-1]
        if value is _MARK:
            raise self.damage("a mark is used as a value")
        return value

    def pop_to_mark(self) -> list[object]:
        stack = self.stack
        for index in range(len(stack) - 1, -1, -1):
            if stack[index] is _MARK:
                items = stack[index + 1 :]
                del stack[index:]
                return items
        raise self.damage("no mark on the stack")

    # --- constants

    def none(self) -> None:
        self.stack.append(None)

    def true(self) -> None:
        self.stack.append(True)

    def false(self) -> None:
        self.stack.append(False)

    def push_int(self, value: int, start: int) -> None:
        self.placed += 1
        if self.placed > MAX_PLACED_INTS:
            self.stack.append(value)
            return
        number = int.__new__(StoredInt, value)
        number.at = (self.segment, start, self.pos - start)
        self.stack.append(number)

    def binint1(self) -> None:
        start = self.pos - 1
        value = self.data[self.pos]
        self.pos += 1
        self.push_int(value, start)

    def binint2(self) -> None:
        start = self.pos - 1
        self.push_int(self.number(_U16), start)

    def binint(self) -> None:
        start = self.pos - 1
        self.push_int(self.number(_I32), start)

    def long1(self) -> None:
        start = self.pos - 1
        self.stack.append(StoredInt(self.long_value(self.take(1)[0]), self.place(start)))

    def long4(self) -> None:
        start = self.pos - 1
        self.stack.append(StoredInt(self.long_value(self.number(_I32)), self.place(start)))

    def long_value(self, count: int) -> int:
        if not 0 <= count <= MAX_INT_BYTES:
            raise self.damage(f"an integer of {count} bytes: at most {MAX_INT_BYTES} are read")
        return int.from_bytes(self.take(count), "little", signed=True)

    def text_int(self) -> None:
        start = self.pos - 1
        text = self.line().rstrip(b"L")
        if text in (b"00", b"01"):
            self.stack.append(text == b"01")
            return
        digits = text.removeprefix(b"-")
        if not digits.isdigit() or len(digits) > 2 * MAX_INT_BYTES:
            raise self.damage(f"{text[:20]!r} is no integer")
        self.stack.append(StoredInt(int(text), self.place(start)))

    def binfloat(self) -> None:
        start = self.pos - 1
        number = float.__new__(StoredFloat, _F64.unpack(self.take(8))[0])
        number.at = (self.segment, start, 9)
        self.stack.append(number)

    def text_float(self) -> None:
        start = self.pos - 1
        text = self.line()
        try:
            value = float(text)
        except ValueError:
            raise self.damage(f"{text[:20]!r} is no float") from None
        self.stack.append(StoredFloat(value, self.place(start)))

    # --- text and bytes

    def push_text(self, start: int, count: int) -> None:
        self.stack.append(self.take(count).decode("utf-8", "surrogatepass"))
        self.texts = (self.texts[1], start)

    def binunicode(self) -> None:
        start = self.pos - 1
        self.push_text(start, self.number(_U32))

    def short_binunicode(self) -> None:
        start = self.pos - 1
        self.push_text(start, self.take(1)[0])

    def binunicode8(self) -> None:
        start = self.pos - 1
        self.push_text(start, self.number(_U64))

    def unicode_line(self) -> None:
        self.stack.append(self.line().decode("raw-unicode-escape"))

    def string_line(self) -> None:
        text = self.line()
        if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in b"'\"":
            raise self.damage("a quoted string without its quotes")
        self.stack.append(text[1:-1].decode("latin1"))

    def binstring(self) -> None:
        count = self.number(_I32)
        if count < 0:
            raise self.damage("a string of negative length")
        self.stack.append(self.take(count).decode("latin1"))

    def short_binstring(self) -> None:
        self.stack.append(self.take(self.take(1)[0]).decode("latin1"))

    def push_bytes(self, start: int, count: int) -> None:
        raw = RawBytes(self.take(count))
        raw.place = self.place(start)
        self.stack.append(raw)

    def short_binbytes(self) -> None:
        start = self.pos - 1
        self.push_bytes(start, self.take(1)[0])

    def binbytes(self) -> None:
        start = self.pos - 1
        self.push_bytes(start, self.number(_U32))

    def binbytes8(self) -> None:
        start = self.pos - 1
        self.push_bytes(start, self.number(_U64))

    def text_place(self, text: str) -> Place | None:
        """The place of the literal `text` if it is one of the last two that were read, else None."""
        encoded = text.encode("utf-8", "surrogatepass")
        literal = b"X" + _U32.pack(len(encoded)) + encoded
        for start in self.texts:
            if start >= 0 and self.data.startswith(literal, start):
                return Place(self.segment, start, len(literal), Encoding.LATIN1)
        return None

    # --- containers

    def mark(self) -> None:
        self.stack.append(_MARK)

    def empty_tuple(self) -> None:
        self.stack.append(())

    def tuple_(self) -> None:
        self.stack.append(tuple(self.pop_to_mark()))

    def tuple1(self) -> None:
        self.stack.append((self.pop(),))

    def tuple2(self) -> None:
        last = self.pop()
        self.stack.append((self.pop(), last))

    def tuple3(self) -> None:
        last, middle = self.pop(), self.pop()
        self.stack.append((self.pop(), middle, last))

    def empty_list(self) -> None:
        self.stack.append([])

    def list_(self) -> None:
        self.stack.append(self.pop_to_mark())

    def append(self) -> None:
        value = self.pop()
        self.extend([value])

    def appends(self) -> None:
        self.extend(self.pop_to_mark())

    def extend(self, values: list[object]) -> None:
        target = self.top()
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, Opaque):
            target.elements.extend(values)
        elif not isinstance(target, dict):  # a dict subclass may be extended by its own class; nothing to keep
            raise self.damage(f"items are appended to a {type(target).__name__}")

    def empty_dict(self) -> None:
        self.stack.append({})

    def dict_(self) -> None:
        target: dict[object, object] = {}
        self.fill(target, self.pop_to_mark())
        self.stack.append(target)

    def setitem(self) -> None:
        value, key = self.pop(), self.pop()
        self.set_items([key, value])

    def setitems(self) -> None:
        self.set_items(self.pop_to_mark())

    def set_items(self, pairs: list[object]) -> None:
        target = self.top()
        if isinstance(target, dict):
            self.fill(target, pairs)
        elif isinstance(target, Opaque):
            self.fill(target.items, pairs)
        else:
            raise self.damage(f"items are set on a {type(target).__name__}")

    def fill(self, target: dict[object, object], pairs: list[object]) -> None:
        if len(pairs) % 2:
            raise self.damage("a dict gets a key without a value")
        for index in range(0, len(pairs), 2):
            target[self.key(pairs[index])] = pairs[index + 1]

    def key(self, value: object, depth: int = 0) -> object:
        """`value` as a dict key: only kinds whose hash neither recurses deeply nor can be made to collide."""
        if isinstance(value, str):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            if not -(2**63) <= value < 2**64:
                raise self.damage("a dict key is an integer beyond 64 bits")
            return int(value)
        if isinstance(value, tuple):
            if depth >= MAX_KEY_DEPTH:
                raise self.damage(f"a dict key is a tuple nested deeper than {MAX_KEY_DEPTH}")
            self.charge(len(value))
            return tuple(self.key(item, depth + 1) for item in value)
        if value is None or isinstance(value, (bool, float, bytes, Global, Opaque, StorageRef, TensorRef)):
            return value
        raise self.damage(f"a dict key is a {type(value).__name__}")

    def empty_set(self) -> None:
        self.stack.append(Opaque("builtins.set"))

    def frozenset_(self) -> None:
        self.stack.append(Opaque("builtins.frozenset", elements=self.pop_to_mark()))

    def bytearray8(self) -> None:
        self.stack.append(Opaque("builtins.bytearray", (self.take(self.number(_U64)),)))

    # --- what would import or call

    def global_(self) -> None:
        self.push_global(self.line().decode("utf-8"), self.line().decode("utf-8"))

    def stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str) or len(name) + len(module) > MAX_LINE:
            raise self.damage("a global is named by something else than two strings")
        self.push_global(module, name)

    def push_global(self, module: str, name: str) -> None:
        self.globals.add(f"{module}.{name}")
        self.stack.append(Global(module, name))

    def call(self, target: object, args: object) -> object:
        if not isinstance(args, tuple):
            raise self.damage(f"call arguments are a {type(args).__name__}")
        if args and isinstance(args[0], (str, list, tuple, dict)):
            self.charge(len(args[0]))  # a small pickle must not copy one long value a million times
        name = target.dotted if isinstance(target, Global) else f"<{type(target).__name__}>"
        value = reduce_global(name, args, self.text_place)
        if isinstance(value, TensorRef) and all(value is not arg for arg in args):
            self.tensors.append(value)
        return value

    def reduce(self) -> None:
        args = self.pop()
        self.stack.append(self.call(self.pop(), args))

    newobj = reduce

    def newobj_ex(self) -> None:
        kwargs, args = self.pop(), self.pop()
        value = self.call(self.pop(), args)
        build_state(value, kwargs)
        self.stack.append(value)

    def build(self) -> None:
        state = self.pop()
        if isinstance(state, dict):
            self.charge(len(state))
        build_state(self.top(), state)

    def inst(self) -> None:
        module, name = self.line().decode("utf-8"), self.line().decode("utf-8")
        self.globals.add(f"{module}.{name}")
        self.stack.append(self.call(Global(module, name), tuple(self.pop_to_mark())))

    def obj(self) -> None:
        items = self.pop_to_mark()
        if not items:
            raise self.damage("an object without a class")
        self.stack.append(self.call(items[0], tuple(items[1:])))

    def extension(self, count: int) -> None:
        code = int.from_bytes(self.take(count), "little")
        self.push_global("copyreg", f"extension_{code}")

    def ext1(self) -> None:
        self.extension(1)

    def ext2(self) -> None:
        self.extension(2)

    def ext4(self) -> None:
        self.extension(4)

    def persistent(self, pid: object) -> None:
        storage = storage_from_persistent_id(pid)
        self.stack.append(storage if storage else Opaque("persistent_id", (pid,)))

    def persid(self) -> None:
        self.persistent(self.line().decode("latin1"))

    def binpersid(self) -> None:
        self.persistent(self.pop())

    # --- memo, framing, and the rest

    def binput(self) -> None:
        index = self.data[self.pos]
        self.pos += 1
        self.memo[index] = self.top()

    def long_binput(self) -> None:
        self.memo[self.number(_U32)] = self.top()

    def put(self) -> None:
        self.memo[self.line_index()] = self.top()

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.top()

    def binget(self) -> None:
        index = self.data[self.pos]
        self.pos += 1
        self.stack.append(self.memo[index])

    def long_binget(self) -> None:
        self.stack.append(self.memo[self.number(_U32)])

    def get(self) -> None:
        self.stack.append(self.memo[self.line_index()])

    def line_index(self) -> int:
        text = self.line()
        if not text.isdigit() or len(text) > 10:
            raise self.damage(f"{text[:20]!r} is no memo index")
        return int(text)

    def proto(self) -> None:
        version = self.take(1)[0]
        if version > 5:
            raise self.damage(f"protocol {version}: protocols 0 to 5 are known")

    def frame(self) -> None:
        length = self.number(_U64)
        if self.pos + length > len(self.data):
            raise PickleEndsEarly(f"pickle frame of {length} bytes at {self.pos} is longer than the data")
        self.frames.append(Frame(start=self.pos, length=length))

    def discard(self) -> None:
        self.stack.pop()

    def dup(self) -> None:
        self.stack.append(self.top())

    def pop_mark(self) -> None:
        self.pop_to_mark()

    def next_buffer(self) -> None:
        self.stack.append(Opaque("pickle.PickleBuffer"))

    def readonly_buffer(self) -> None:
        self.top()


_OPCODES: dict[str, Callable[[_Machine], None]] = {
    "N": _Machine.none, "\x88": _Machine.true, "\x89": _Machine.false,
    "K": _Machine.binint1, "M": _Machine.binint2, "J": _Machine.binint, "\x8a": _Machine.long1, "\x8b": _Machine.long4,
    "I": _Machine.text_int, "L": _Machine.text_int, "G": _Machine.binfloat, "F": _Machine.text_float,
    "X": _Machine.binunicode, "\x8c": _Machine.short_binunicode, "\x8d": _Machine.binunicode8,
    "V": _Machine.unicode_line, "S": _Machine.string_line, "T": _Machine.binstring, "U": _Machine.short_binstring,
    "C": _Machine.short_binbytes, "B": _Machine.binbytes, "\x8e": _Machine.binbytes8, "\x96": _Machine.bytearray8,
    "(": _Machine.mark, ")": _Machine.empty_tuple, "t": _Machine.tuple_, "\x85": _Machine.tuple1,
    "\x86": _Machine.tuple2, "\x87": _Machine.tuple3, "]": _Machine.empty_list, "l": _Machine.list_,
    "a": _Machine.append, "e": _Machine.appends, "}": _Machine.empty_dict, "d": _Machine.dict_,
    "s": _Machine.setitem, "u": _Machine.setitems, "\x8f": _Machine.empty_set, "\x90": _Machine.appends,
    "\x91": _Machine.frozenset_, "c": _Machine.global_, "\x93": _Machine.stack_global, "R": _Machine.reduce,
    "\x81": _Machine.newobj, "\x92": _Machine.newobj_ex, "b": _Machine.build, "i": _Machine.inst, "o": _Machine.obj,
    "\x82": _Machine.ext1, "\x83": _Machine.ext2, "\x84": _Machine.ext4, "P": _Machine.persid,
    "Q": _Machine.binpersid, "q": _Machine.binput, "r": _Machine.long_binput, "p": _Machine.put,
    "\x94": _Machine.memoize, "h": _Machine.binget, "j": _Machine.long_binget, "g": _Machine.get,
    "\x80": _Machine.proto, "\x95": _Machine.frame, "0": _Machine.discard, "2": _Machine.dup, "1": _Machine.pop_mark,
    "\x97": _Machine.next_buffer, "\x98": _Machine.readonly_buffer,
}  # fmt: skip
for _code, _method in _OPCODES.items():
    _Machine._TABLE[ord(_code)] = _method
