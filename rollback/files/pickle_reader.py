"""Opcodes that build tuples, lists, dicts and sets. A dict key is of a kind whose hash neither recurses nor collides."""

from __future__ import annotations

import struct

from rollback.files.pickle_machine import MARK, PLACED_INT_BYTES, Machine, Opcode
from rollback.files.pickle_values import Global, Opaque, StorageRef, StoredInt, TensorRef

MAX_KEY_DEPTH = 8  # hashing a tuple recurses in C, without a check of depth
OPAQUE_BYTES = 256
_U64 = struct.Struct("<Q")


def mark(m: Machine) -> None:
    m.stack.append(MARK)


# --- tuples


def empty_tuple(m: Machine) -> None:
    m.stack.append(())


def tuple_(m: Machine) -> None:
    m.stack.append(tuple(m.unplaced(m.pop_to_mark())))


def tuple1(m: Machine) -> None:
    m.stack.append(tuple(m.unplaced([m.pop()])))


def tuple2(m: Machine) -> None:
    last = m.pop()
    m.stack.append(tuple(m.unplaced([m.pop(), last])))


def tuple3(m: Machine) -> None:
    last, middle = m.pop(), m.pop()
    m.stack.append(tuple(m.unplaced([m.pop(), middle, last])))


# --- lists


def empty_list(m: Machine) -> None:
    m.stack.append([])


def list_(m: Machine) -> None:
    m.stack.append(m.pop_to_mark())


def append(m: Machine) -> None:
    value = m.pop()
    _extend(m, [value])


def appends(m: Machine) -> None:
    _extend(m, m.pop_to_mark())


def _extend(m: Machine, values: list[object]) -> None:
    target = m.top()
    if isinstance(target, list):
        target.extend(values)
    elif isinstance(target, Opaque):
        target.elements.extend(values)
    elif not isinstance(target, dict):  # a dict subclass may be extended by its own class; nothing to keep
        raise m.damage(f"items are appended to a {type(target).__name__}")


# --- dicts and sets


def empty_dict(m: Machine) -> None:
    m.stack.append({})


def dict_(m: Machine) -> None:
    target: dict[object, object] = {}
    _fill(m, target, m.pop_to_mark())
    m.stack.append(target)


def setitem(m: Machine) -> None:
    value, key = m.pop(), m.pop()
    _set_items(m, [key, value])


def setitems(m: Machine) -> None:
    _set_items(m, m.pop_to_mark())


def _set_items(m: Machine, pairs: list[object]) -> None:
    target = m.top()
    if isinstance(target, dict):
        _fill(m, target, pairs)
    elif isinstance(target, Opaque):
        _fill(m, target.items, pairs)
    else:
        raise m.damage(f"items are set on a {type(target).__name__}")


def _fill(m: Machine, target: dict[object, object], pairs: list[object]) -> None:
    if len(pairs) % 2:
        raise m.damage("a dict gets a key without a value")
    for index in range(0, len(pairs), 2):
        target[_key(m, pairs[index])] = pairs[index + 1]


def _key(m: Machine, value: object, depth: int = 0) -> object:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        if not -(2**63) <= value < 2**64:
            raise m.damage("a dict key is an integer beyond 64 bits")
        if type(value) is StoredInt and depth == 0:
            m.left += PLACED_INT_BYTES
        return int(value)
    if isinstance(value, tuple):
        if depth >= MAX_KEY_DEPTH:
            raise m.damage(f"a dict key is a tuple nested deeper than {MAX_KEY_DEPTH}")
        m.spend(64 * (len(value) + 1))
        return tuple(_key(m, item, depth + 1) for item in value)
    if value is None or isinstance(value, (bool, float, bytes, Global, Opaque, StorageRef, TensorRef)):
        return value
    raise m.damage(f"a dict key is a {type(value).__name__}")


def empty_set(m: Machine) -> None:
    m.spend(OPAQUE_BYTES)
    m.stack.append(Opaque("builtins.set"))


def frozenset_(m: Machine) -> None:
    m.spend(OPAQUE_BYTES)
    m.stack.append(Opaque("builtins.frozenset", elements=m.pop_to_mark()))


def bytearray8(m: Machine) -> None:
    raw = m.take(m.number(_U64))
    m.spend(OPAQUE_BYTES + len(raw))
    m.stack.append(Opaque("builtins.bytearray", (raw,)))


CONTAINER_OPCODES: dict[str, Opcode] = {
    "(": mark, ")": empty_tuple, "t": tuple_, "\x85": tuple1, "\x86": tuple2, "\x87": tuple3,
    "]": empty_list, "l": list_, "a": append, "e": appends,
    "}": empty_dict, "d": dict_, "s": setitem, "u": setitems,
    "\x8f": empty_set, "\x90": appends, "\x91": frozenset_, "\x96": bytearray8,
}  # fmt: skip
