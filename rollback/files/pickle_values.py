"""The values that reading a pickle without executing it can yield, beside plain dicts, lists, tuples and strings.

A number keeps the place of its bytes (`StoredFloat`, `StoredInt`), so that one constant can be replaced without
re-pickling the rest. Whatever would have been built by running code stays a description (`Opaque`, `TensorRef`).
Nothing here reads files; the machine that produces these values is `rollback.files.reader`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Encoding(Enum):
    """How a number is written at its place."""

    OPCODE = "opcode"  # a pickle constant: opcode byte and argument
    RAW = "raw"  # bytes of a numpy scalar or of a tensor element, in `dtype`
    LATIN1 = "latin1"  # the same bytes as UTF-8 text: protocol 2 has no bytes literal
    JSON = "json"  # digits in a JSON text


class Place(NamedTuple):
    """Where one number lies: byte `offset` and `width` inside segment `segment` of the file.

    For `Encoding.OPCODE` and `LATIN1` the offset counts from the start of the pickle and covers the opcode;
    for a tensor element (`record` is set) it counts from the start of that zip record or of the file.
    """

    segment: int
    offset: int
    width: int
    encoding: Encoding
    dtype: str = ""
    record: str | None = None


# The place of a pickle constant as one integer: segment, offset (48 bits) and width (16 bits), because there are so many.
Spot = int


class StoredFloat(float):
    """A float read from a pickle; `place` says where its bytes are, None when it cannot be edited."""

    __slots__ = ("at",)
    at: Spot | Place | None

    def __new__(cls, value: float, place: Place | None) -> StoredFloat:
        self = float.__new__(cls, value)
        self.at = place
        return self

    @property
    def place(self) -> Place | None:
        return _place(self.at)

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)


class StoredInt(int):
    """An int read from a pickle; `place` says where its bytes are, None when it cannot be edited."""

    at: Spot | Place | None

    def __new__(cls, value: int, place: Place | None) -> StoredInt:
        self = int.__new__(cls, value)
        self.at = place
        return self

    @property
    def place(self) -> Place | None:
        return _place(self.at)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def _place(at: Spot | Place | None) -> Place | None:
    if at is None or isinstance(at, Place):
        return at
    return Place(at >> 64, (at >> 16) & 0xFFFFFFFFFFFF, at & 0xFFFF, Encoding.OPCODE)


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a loader would import: it is never imported here."""

    module: str
    name: str

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Opaque:
    """An object of a class this package does not model: its name and everything the pickle says about it.

    `items` are its dict items, `elements` its list elements. Identity is the object's own, so it can be a dict key.
    """

    name: str
    args: tuple[object, ...] = ()
    state: object = None
    items: dict[object, object] = field(default_factory=dict)
    elements: list[object] = field(default_factory=list)

    def children(self) -> dict[object, object]:
        """Named parts in one mapping: attributes, then dict items; empty when the state is not a mapping."""
        attributes = self.state if isinstance(self.state, dict) else {}
        return {**attributes, **self.items}


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A tensor storage named by a persistent id: `key` names its record, `numel` counts elements of `dtype`."""

    dtype: str
    key: str
    location: str
    numel: int


@dataclass(slots=True, eq=False)
class TensorRef:
    """A tensor seen from outside: everything but its bytes. Shape and stride in elements.

    `value` is the single element of a 0-dim tensor where the file lets it be read, else None.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage: StorageRef | None
    storage_offset: int
    value: StoredFloat | StoredInt | bool | None = None

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(slots=True, eq=False)
class ArrayRef:
    """A numpy array in a pickle: `content` holds its bytes when they lie in the pickle itself.

    Made empty by the call that allocates the array and filled by the BUILD that follows it.
    """

    dtype: str = "unknown"
    shape: tuple[int, ...] = ()
    content: bytes | None = None
