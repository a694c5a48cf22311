"""The edit of a state file: the fields, their new bytes, and the check that nothing else changes.

`rollback.files.state_file` writes the edited file. A constant of a pickle is written with the width and opcode of the old one,
or as wide as it needs to be.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from rollback.errors import PlanRefused
from rollback.files.json_file import Keys
from rollback.files.pickle_reader import read_pickle
from rollback.files.pickle_values import Encoding, NumberPlace, StoredFloat, encode_number
from rollback.files.torch_tree import Container, TorchFile, place_of, walk_leaves


class WidthChanges(PlanRefused):
    """A value needs more bytes than the old one has."""


def encode_any_width(value: int | float, old: bytes, place: NumberPlace) -> bytes:
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
        raise PlanRefused(
            f"{value!r} is not a counter: expected an integer of at most 255 bytes", "give another number with --set"
        )
    return b"\x8a" + bytes([count]) + value.to_bytes(count, "little", signed=True)


def encode_same_width(value: int | float, old: bytes, place: NumberPlace) -> bytes:
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


# --- Fields to change, and the check of the result

Edits = Mapping[Keys, int | float]


@dataclass(frozen=True, slots=True)
class NumberChange:
    """One number to change: where it is and what it becomes, in the type it is stored as."""

    keys: Keys
    place: NumberPlace
    value: int | float


def changes_of(file: TorchFile, edits: Edits) -> list[NumberChange]:
    """The numbers to change in `file`, with their places; raises `PlanRefused` when one cannot be edited or is shared."""
    changes: list[NumberChange] = []
    for keys, value in edits.items():
        old = file.get(keys)
        place = place_of(old)
        if place is None or isinstance(value, bool):
            raise PlanRefused(
                f"`{file.path.name}`: {dotted(keys)} is a {type(old).__name__} that cannot be edited in place",
                "only numbers whose bytes were found can be changed",
            )
        record = file.segments[place.segment].record if file.segments else None
        if record is not None and place.record is None and not record.stored:
            raise PlanRefused(
                f"`{file.path.name}`: record `{record.name}` is compressed: only stored records can be edited",
                "re-save the file with torch.save, or unzip it and zip it with `zip -0`",
            )
        changes.append(NumberChange(keys, place, _as_stored(old, value)))
    _check_shared(file, changes)
    return changes


def _as_stored(old: object, value: int | float) -> int | float:
    if isinstance(old, StoredFloat):
        return float(value)
    return int(value) if isinstance(value, int) or (math.isfinite(value) and value == int(value)) else value


def _check_shared(file: TorchFile, changes: list[NumberChange]) -> None:
    """Refuse when bytes to be changed also hold a field that is not to be changed, or not to the same value."""
    wanted: dict[NumberPlace, NumberChange] = {}
    for change in changes:
        other = wanted.setdefault(change.place, change)
        if other.value != change.value:
            raise PlanRefused(
                f"`{file.path.name}`: {dotted(other.keys)} and {dotted(change.keys)} are the same stored number, "
                f"but the plan sets them to {other.value!r} and {change.value!r}", "edit both to the same value",
            )
    edited = {change.keys for change in changes}
    for leaf in walk_leaves(file.tree):
        place = place_of(leaf.value)
        if place is not None and place in wanted and leaf.keys not in edited:
            raise PlanRefused(
                f"`{file.path.name}`: {dotted(leaf.keys)} is the same stored number as "
                f"{dotted(wanted[place].keys)}: one cannot change without the other",
                "edit both to the same value",
            )


def dotted(keys: Keys) -> str:
    """A key path as text."""
    return ".".join(map(str, keys))


def compare(file: TorchFile, before: bytes, after: bytes, changes: list[NumberChange], *, depth: int = 0) -> None:
    """Read both pickles and compare every value; raises `PlanRefused` unless exactly `changes` differ."""
    start, limits = _main_pickle_start(file, before), file.limits
    old, new = (
        {leaf.keys: leaf.value for leaf in walk_leaves(read_pickle(data, start=start, limits=limits).value)}
        for data in (before, after)
    )
    inside = {c.keys[depth:]: c for c in changes if c.place.record is None}
    for keys in old.keys() | new.keys():
        change = inside.get(keys)
        expected = change.value if change else old.get(keys)
        if change and change.place.encoding is not Encoding.OPCODE:
            continue  # a numpy scalar narrows its value; its literal was matched byte for byte when it was found
        if not _same(expected, new.get(keys)):
            raise PlanRefused(
                f"`{file.path.name}`: {dotted(keys)} would become {new.get(keys)!r} instead of {expected!r}",
                "nothing was changed; go back without changing this field, and report this file",
            )


def _main_pickle_start(file: TorchFile, data: bytes) -> int:
    """Where the object's pickle begins: in a legacy stream three small pickles come before it."""
    at = 0
    if file.container is Container.LEGACY:
        for _ in range(3):
            at = read_pickle(data, start=at).end
    return at


def _same(expected: object, found: object) -> bool:
    if isinstance(expected, float) and isinstance(found, float):
        return struct.pack("<d", expected) == struct.pack("<d", found)
    if isinstance(expected, (int, float, str, bytes)) or expected is None:
        return expected == found
    return type(expected) is type(found)
