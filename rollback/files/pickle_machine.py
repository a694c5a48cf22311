"""The stack machine that reads a pickle: its stream, its stack, its memo, and the budget that bounds all of them.

Opcodes are functions of a machine, gathered by kind in `constants`, `containers`, `calls` and `memory`. What an opcode
makes is paid for before it is made: by the opcode itself (OPCODE_BYTES), and where it takes more, by `spend`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from rollback.errors import UnreadableFile
from rollback.files.pickle_values import Encoding, Place, StoredInt, TensorRef

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
