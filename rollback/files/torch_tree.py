"""The content of a state file after reading: a tree of plain values, addressed by key paths.

`rollback.files.state_file` reads it from disk, `rollback.files.state_file` writes changed copies. Trees come from untrusted
files: they may share parts or contain themselves, so the walks here are iterative and bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from pathlib import Path

from rollback.errors import UnknownFormat, UnreadableFile
from rollback.files.json_file import Keys
from rollback.files.pickle_machine import Frame, Limits
from rollback.files.pickle_values import ArrayRef, NumberPlace, Opaque, StoredFloat, StoredInt, TensorRef
from rollback.files.torch_zip import ZipLayout, ZipRecord

_MAX_LEAVES = 1_000_000
_MAX_DEPTH = 200

Key = str | int


class Container(Enum):
    """How the bytes of a state file are arranged."""

    ZIP = "torch zip"
    LEGACY = "torch legacy stream"
    PICKLE = "pickle"
    JSON = "json"
    DCP = "dcp entries"


class LeafKind(Enum):
    """What kind of value ends a key path."""

    FLOAT = "float"
    INT = "int"
    BOOL = "bool"
    TEXT = "text"
    BYTES = "bytes"
    NONE = "none"
    TENSOR = "tensor"
    SCALAR_TENSOR = "scalar tensor"
    ARRAY = "array"
    OPAQUE = "opaque"
    CYCLE = "cycle"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value without parts and its key path; a readable 0-dim tensor is given as its number."""

    keys: Keys
    value: object
    kind: LeafKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PickleSegment:
    """One pickle inside the file: places in it count from `pickle_offset`, an absolute byte offset.

    `layout` and `record` are set when the pickle is the record `data.pkl` of a zip. `keys` is where the segment's
    value hangs in the file's tree.
    """

    pickle_offset: int
    pickle_bytes: int
    frames: tuple[Frame, ...] = ()
    layout: ZipLayout | None = None
    record: ZipRecord | None = None
    big_endian: bool = False
    keys: Keys = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile:
    """A state file read without executing it: a `tree` of plain values, and `segments` that locate its numbers."""

    path: Path
    container: Container
    tree: object
    segments: tuple[PickleSegment, ...]
    size_bytes: int
    limits: Limits = field(default_factory=Limits)
    globals: frozenset[str] = frozenset()
    tensors: tuple[TensorRef, ...] = field(default=(), repr=False)

    def get(self, keys: Keys) -> object:
        """The value at a key path, a readable 0-dim tensor as its number; raises `UnknownFormat` when there is none."""
        value = self.tree
        for depth, key in enumerate(keys):
            found, value = step_into(value, key)
            if not found:
                where = ".".join(map(str, keys[:depth])) or "the top level"
                raise UnknownFormat(f"`{self.path.name}` has no field `{key}` at {where}: {_names(value)}")
        return plain_number(value)

    def leaves(self) -> Iterator[Leaf]:
        """The leaves in file order. A container reached twice is walked twice; one inside itself is a CYCLE leaf."""
        return walk_leaves(self.tree)


def children_of(value: object) -> Iterator[tuple[Key, object]] | None:
    """The parts of a container, or None for a leaf; of an object also what it was made from, and what it holds unnamed.

    Keys other than strings and ints are shown as text. A set has no order. `step_into` follows all other keys.
    """
    if isinstance(value, dict):
        return ((k if isinstance(k, (str, int)) else str(k)[:200], v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return iter(enumerate(value))
    if isinstance(value, ArrayRef):
        return iter(enumerate(value.elements)) if value.elements else None
    if not isinstance(value, Opaque) or value.name == "torch.storage._load_from_bytes":  # a stream in which addresses stand
        return None
    parts = value.children()
    if value.name.endswith("set"):
        inner = value.args[0] if value.args and isinstance(value.args[0], list) else []
        parts |= enumerate(sorted([*value.elements, *inner], key=repr))
        return children_of(parts)
    parts |= enumerate(value.elements)
    if value.args:
        parts["(args)"] = value.args
    if value.state is not None and not isinstance(value.state, dict):
        parts["(state)"] = value.state
    return children_of(parts) if parts else None


def step_into(value: object, key: Key) -> tuple[bool, object]:
    """(True, the part of `value` named `key`), or (False, value)."""
    if isinstance(value, Opaque):
        named = {"(args)": value.args, "(state)": value.state, **value.children()}
        value = named if key in named else value.elements or value.state
    if isinstance(value, ArrayRef):
        value = value.elements
    if isinstance(value, dict) and key in value:
        return True, value[key]
    if isinstance(value, (list, tuple)) and isinstance(key, int) and -len(value) <= key < len(value):
        return True, value[key]
    return False, value


def plain_number(value: object) -> object:
    """The number a readable 0-dim tensor holds; anything else as it is."""
    return value.value if isinstance(value, TensorRef) and value.value is not None else value


def place_of(value: object) -> NumberPlace | None:
    """Where the bytes of a number are, None when it cannot be edited."""
    number = plain_number(value)
    return number.place if isinstance(number, (StoredFloat, StoredInt)) else None


def leaf_kind(value: object) -> LeafKind:
    """The kind of a value that has no parts."""
    if value is None:
        return LeafKind.NONE
    if isinstance(value, TensorRef):
        return LeafKind.TENSOR if value.value is None else LeafKind.SCALAR_TENSOR
    for kind, types in _KINDS.items():
        if isinstance(value, types):
            return kind
    return LeafKind.OPAQUE


_KINDS: Mapping[LeafKind, type | tuple[type, ...]] = {
    LeafKind.BOOL: bool,  # before INT: a bool is an int
    LeafKind.FLOAT: float,
    LeafKind.INT: int,
    LeafKind.TEXT: str,
    LeafKind.BYTES: (bytes, bytearray),
    LeafKind.ARRAY: ArrayRef,
}


def walk_leaves(tree: object) -> Iterator[Leaf]:
    """The leaves of `tree`, depth first; raises `UnreadableFile` beyond _MAX_LEAVES or _MAX_DEPTH."""
    parts = children_of(tree)
    if parts is None:
        yield Leaf((), plain_number(tree), leaf_kind(tree))
        return
    stack: list[tuple[int, Iterator[tuple[Key, object]]]] = [(id(tree), parts)]
    on_path = {id(tree)}
    keys: list[Key] = []
    steps = 0
    while stack:
        step = next(stack[-1][1], None)
        if step is None:
            on_path.discard(stack.pop()[0])
            if keys:
                keys.pop()
            continue
        steps += 1
        if steps > _MAX_LEAVES:
            raise UnreadableFile(
                f"more than {_MAX_LEAVES} values, with shared parts counted each time: that is not a plausible checkpoint"
            )
        key, value = step
        parts = children_of(value)
        if parts is None:
            yield Leaf((*keys, key), plain_number(value), leaf_kind(value))
        elif id(value) in on_path:
            yield Leaf((*keys, key), None, LeafKind.CYCLE)
        elif len(stack) >= _MAX_DEPTH:
            raise UnreadableFile(f"values are nested deeper than {_MAX_DEPTH}")
        else:
            on_path.add(id(value))
            keys.append(key)
            stack.append((id(value), parts))


def _names(value: object) -> str:
    parts = children_of(value)
    if parts is None:
        return f"it is a {type(value).__name__}"
    names = [str(key) for key, _ in islice(parts, 12)]
    return "there are " + ", ".join(names) if names else "it is empty"
