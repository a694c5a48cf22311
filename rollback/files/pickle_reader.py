"""Reads pickles opcode by opcode into plain values; nothing in a pickle is imported or called.

The opcodes and their arguments are those of Python's `pickletools` (protocols 0 to 5). Three things differ from an
unpickler: a GLOBAL stays a name, a REDUCE stays a description (`rollback.files.pickle_values` models the few calls that
matter), and each number keeps the place of its bytes. Memory is bounded, and therefore time. Invalid pickles raise
`UnreadableFile`.
"""

from __future__ import annotations

import gc
import struct
from dataclasses import dataclass

from rollback.files.pickle_machine import (
    CONSTANT_OPCODES,
    MARK,
    MAX_LINE,
    MEMO_OPCODES,
    OPCODE_BYTES,
    PLACED_INT_BYTES,
    Frame,
    Limits,
    Machine,
    Opcode,
    PickleEndsEarly,
    text_place,
)
from rollback.files.pickle_values import (
    Global,
    Opaque,
    StorageRef,
    StoredInt,
    TensorRef,
    build_state,
    reduce_global,
    storage_from_persistent_id,
)

_MAX_KEY_DEPTH = 8  # hashing a tuple recurses in C, without a check of depth
_OPAQUE_BYTES = 256
_U64 = struct.Struct("<Q")


def _op_mark(m: Machine) -> None:
    m.stack.append(MARK)


# --- tuples


def _op_empty_tuple(m: Machine) -> None:
    m.stack.append(())


def _op_tuple_(m: Machine) -> None:
    m.stack.append(tuple(m.unplaced(m.pop_to_mark())))


def _tuple_of(size: int) -> Opcode:
    """The opcode that makes a tuple of the top `size` values."""

    def execute(m: Machine) -> None:
        values = [m.pop() for _ in range(size)]
        values.reverse()
        m.stack.append(tuple(m.unplaced(values)))

    return execute


# --- lists


def _op_empty_list(m: Machine) -> None:
    m.stack.append([])


def _op_list_(m: Machine) -> None:
    m.stack.append(m.pop_to_mark())


def _op_append(m: Machine) -> None:
    value = m.pop()
    _extend(m, [value])


def _op_appends(m: Machine) -> None:
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


def _op_empty_dict(m: Machine) -> None:
    m.stack.append({})


def _op_dict_(m: Machine) -> None:
    target: dict[object, object] = {}
    _fill(m, target, m.pop_to_mark())
    m.stack.append(target)


def _op_setitem(m: Machine) -> None:
    value, key = m.pop(), m.pop()
    _set_items(m, [key, value])


def _op_setitems(m: Machine) -> None:
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
        if depth >= _MAX_KEY_DEPTH:
            raise m.damage(f"a dict key is a tuple nested deeper than {_MAX_KEY_DEPTH}")
        m.spend(64 * (len(value) + 1))
        return tuple(_key(m, item, depth + 1) for item in value)
    if value is None or isinstance(value, (bool, float, bytes, Global, Opaque, StorageRef, TensorRef)):
        return value
    raise m.damage(f"a dict key is a {type(value).__name__}")


def _op_empty_set(m: Machine) -> None:
    m.spend(_OPAQUE_BYTES)
    m.stack.append(Opaque("builtins.set"))


def _op_frozenset_(m: Machine) -> None:
    m.spend(_OPAQUE_BYTES)
    m.stack.append(Opaque("builtins.frozenset", elements=m.pop_to_mark()))


def _op_bytearray8(m: Machine) -> None:
    raw = m.take(m.number(_U64))
    m.spend(_OPAQUE_BYTES + len(raw))
    m.stack.append(Opaque("builtins.bytearray", (raw,)))


_CONTAINER_OPCODES: dict[str, Opcode] = {
    "(": _op_mark, ")": _op_empty_tuple, "t": _op_tuple_, "\x85": _tuple_of(1), "\x86": _tuple_of(2),
    "\x87": _tuple_of(3), "]": _op_empty_list, "l": _op_list_, "a": _op_append, "e": _op_appends, "}": _op_empty_dict,
    "d": _op_dict_, "s": _op_setitem, "u": _op_setitems, "\x8f": _op_empty_set, "\x90": _op_appends,
    "\x91": _op_frozenset_, "\x96": _op_bytearray8,
}  # fmt: skip


# --- Opcodes: globals and calls

_GLOBAL_BYTES = 320


def _op_global_(m: Machine) -> None:
    _push_global(m, m.line().decode("utf-8"), m.line().decode("utf-8"))


def _op_stack_global(m: Machine) -> None:
    name, module = m.pop(), m.pop()
    if not isinstance(name, str) or not isinstance(module, str) or len(name) + len(module) > MAX_LINE:
        raise m.damage("the module and name of a global are not two strings")
    _push_global(m, module, name)


def _push_global(m: Machine, module: str, name: str) -> None:
    m.spend(_GLOBAL_BYTES + 8 * (len(module) + len(name)))
    m.globals.add(f"{module}.{name}")
    m.stack.append(Global(module, name))


def _call(m: Machine, target: object, args: object) -> object:
    if not isinstance(args, tuple):
        raise m.damage(f"call arguments are a {type(args).__name__}")
    m.spend(_OPAQUE_BYTES)
    if args and isinstance(args[0], (list, tuple, dict)):
        m.spend(100 * len(args[0]))  # the call may copy it: a small pickle must not copy one long value a million times
    elif args and isinstance(args[0], str):
        m.spend(8 * len(args[0]))
    name = target.dotted if isinstance(target, Global) else f"<{type(target).__name__}>"
    value = reduce_global(name, args, lambda text: text_place(m, text))
    if isinstance(value, TensorRef) and all(value is not arg for arg in args):
        m.tensors.append(value)
    return value


def _op_reduce(m: Machine) -> None:
    args = m.pop()
    m.stack.append(_call(m, m.pop(), args))


def _op_newobj_ex(m: Machine) -> None:
    kwargs, args = m.pop(), m.pop()
    value = _call(m, m.pop(), args)
    _build(m, value, kwargs)
    m.stack.append(value)


def _op_build(m: Machine) -> None:
    state = m.pop()
    _build(m, m.top(), state)


def _build(m: Machine, target: object, state: object) -> None:
    if isinstance(state, dict):
        m.spend(100 * len(state))
    build_state(target, state)


def _op_inst(m: Machine) -> None:
    module, name = m.line().decode("utf-8"), m.line().decode("utf-8")
    m.spend(_GLOBAL_BYTES)
    m.globals.add(f"{module}.{name}")
    m.stack.append(_call(m, Global(module, name), tuple(m.pop_to_mark())))


def _op_obj(m: Machine) -> None:
    items = m.pop_to_mark()
    if not items:
        raise m.damage("an object without a class")
    m.stack.append(_call(m, items[0], tuple(items[1:])))


def _extension(num_bytes: int) -> Opcode:
    """The opcode that names a global by a code of so many bytes."""

    def execute(m: Machine) -> None:
        code = int.from_bytes(m.take(num_bytes), "little")
        _push_global(m, "copyreg", f"extension_{code}")

    return execute


def _persistent(m: Machine, pid: object) -> None:
    m.spend(_OPAQUE_BYTES)
    storage = storage_from_persistent_id(pid)
    m.stack.append(storage if storage else Opaque("persistent_id", (pid,)))


def _op_persid(m: Machine) -> None:
    _persistent(m, m.line().decode("latin1"))


def _op_binpersid(m: Machine) -> None:
    _persistent(m, m.pop())


def _op_next_buffer(m: Machine) -> None:
    m.spend(_OPAQUE_BYTES)
    m.stack.append(Opaque("pickle.PickleBuffer"))


def _op_readonly_buffer(m: Machine) -> None:
    m.top()


_CALL_OPCODES: dict[str, Opcode] = {
    "c": _op_global_, "\x93": _op_stack_global, "R": _op_reduce, "\x81": _op_reduce, "\x92": _op_newobj_ex,
    "b": _op_build, "i": _op_inst, "o": _op_obj, "\x82": _extension(1), "\x83": _extension(2), "\x84": _extension(4),
    "P": _op_persid, "Q": _op_binpersid, "\x97": _op_next_buffer, "\x98": _op_readonly_buffer,
}  # fmt: skip


# --- The reader

_STOP = 0x2E
_BATCH = 1024  # opcodes paid for at once

OPCODES: list[Opcode | None] = [None] * 256
for _code, _opcode in (CONSTANT_OPCODES | _CONTAINER_OPCODES | _CALL_OPCODES | MEMO_OPCODES).items():
    OPCODES[ord(_code)] = _opcode


@dataclass(frozen=True, slots=True, kw_only=True)
class PickleContent:
    """One pickle: its value, where it ends, its frames, the tensors and the globals it names."""

    value: object
    end: int
    frames: tuple[Frame, ...]
    tensors: tuple[TensorRef, ...]
    globals: frozenset[str]
    num_bytes: int  # how much of its memory limit it used


def read_pickle(data: bytes, *, start: int = 0, segment: int = 0, limits: Limits | None = None) -> PickleContent:
    """Read the pickle that starts at byte `start` of `data`; places are offsets into `data` and carry `segment`.

    Raises `UnreadableFile` with the byte position of the problem.
    """
    machine = Machine(data, start, segment, limits or Limits())
    machine.spend(len(data))
    collecting = gc.isenabled()
    gc.disable()  # no cycle can become garbage here, and the collector would walk all values again and again
    try:
        value = _run(machine)
    finally:
        if collecting:
            gc.enable()
    if machine.stack:
        raise machine.damage(f"{len(machine.stack)} values are left on the stack at STOP")
    return PickleContent(
        value=value,
        end=machine.pos,
        frames=tuple(machine.frames),
        tensors=tuple(machine.tensors),
        globals=frozenset(machine.globals),
        num_bytes=machine.limits.num_bytes - machine.left,
    )


def _run(machine: Machine) -> object:
    data, table = machine.data, OPCODES
    try:
        while True:
            machine.spend(_BATCH * OPCODE_BYTES)
            for done in range(1, _BATCH + 1):
                opcode = data[machine.pos]
                machine.pos += 1
                if opcode == _STOP:
                    machine.left += (_BATCH - done) * OPCODE_BYTES
                    return machine.pop()
                execute = table[opcode]
                if execute is None:
                    raise machine.damage(f"unknown opcode {opcode:#04x}")
                execute(machine)
    except IndexError:
        if machine.pos >= len(data):
            raise PickleEndsEarly(f"pickle ends at byte {len(data)} before its STOP opcode") from None
        raise machine.damage("an opcode finds no operand on the stack") from None
    except KeyError as problem:
        raise machine.damage(f"memo entry {problem} is read before it is written") from None
    except UnicodeDecodeError:
        raise machine.damage("a string is not UTF-8") from None
