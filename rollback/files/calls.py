"""Opcodes that would import or call: here a name stays a name, and a call becomes a description."""

from __future__ import annotations

from rollback.files.constants import text_place
from rollback.files.pickle_reader import OPAQUE_BYTES
from rollback.files.globals import build_state, reduce_global, storage_from_persistent_id
from rollback.files.pickle_machine import MAX_LINE, Machine, Opcode
from rollback.files.pickle_values import Global, Opaque, TensorRef

GLOBAL_BYTES = 320


def global_(m: Machine) -> None:
    _push_global(m, m.line().decode("utf-8"), m.line().decode("utf-8"))


def stack_global(m: Machine) -> None:
    name, module = m.pop(), m.pop()
    if not isinstance(name, str) or not isinstance(module, str) or len(name) + len(module) > MAX_LINE:
        raise m.damage("a global is named by something else than two strings")
    _push_global(m, module, name)


def _push_global(m: Machine, module: str, name: str) -> None:
    m.spend(GLOBAL_BYTES + 8 * (len(module) + len(name)))
    m.globals.add(f"{module}.{name}")
    m.stack.append(Global(module, name))


def _call(m: Machine, target: object, args: object) -> object:
    if not isinstance(args, tuple):
        raise m.damage(f"call arguments are a {type(args).__name__}")
    m.spend(OPAQUE_BYTES)
    if args and isinstance(args[0], (list, tuple, dict)):
        m.spend(100 * len(args[0]))  # it may be copied, and a small pickle must not copy one long value a million times
    elif args and isinstance(args[0], str):
        m.spend(8 * len(args[0]))
    name = target.dotted if isinstance(target, Global) else f"<{type(target).__name__}>"
    value = reduce_global(name, args, lambda text: text_place(m, text))
    if isinstance(value, TensorRef) and all(value is not arg for arg in args):
        m.tensors.append(value)
    return value


def reduce(m: Machine) -> None:
    args = m.pop()
    m.stack.append(_call(m, m.pop(), args))


def newobj_ex(m: Machine) -> None:
    kwargs, args = m.pop(), m.pop()
    value = _call(m, m.pop(), args)
    _build(m, value, kwargs)
    m.stack.append(value)


def build(m: Machine) -> None:
    state = m.pop()
    _build(m, m.top(), state)


def _build(m: Machine, target: object, state: object) -> None:
    if isinstance(state, dict):
        m.spend(100 * len(state))
    build_state(target, state)


def inst(m: Machine) -> None:
    module, name = m.line().decode("utf-8"), m.line().decode("utf-8")
    m.spend(GLOBAL_BYTES)
    m.globals.add(f"{module}.{name}")
    m.stack.append(_call(m, Global(module, name), tuple(m.pop_to_mark())))


def obj(m: Machine) -> None:
    items = m.pop_to_mark()
    if not items:
        raise m.damage("an object without a class")
    m.stack.append(_call(m, items[0], tuple(items[1:])))


def _extension(m: Machine, count: int) -> None:
    code = int.from_bytes(m.take(count), "little")
    _push_global(m, "copyreg", f"extension_{code}")


def ext1(m: Machine) -> None:
    _extension(m, 1)


def ext2(m: Machine) -> None:
    _extension(m, 2)


def ext4(m: Machine) -> None:
    _extension(m, 4)


def _persistent(m: Machine, pid: object) -> None:
    m.spend(OPAQUE_BYTES)
    storage = storage_from_persistent_id(pid)
    m.stack.append(storage if storage else Opaque("persistent_id", (pid,)))


def persid(m: Machine) -> None:
    _persistent(m, m.line().decode("latin1"))


def binpersid(m: Machine) -> None:
    _persistent(m, m.pop())


def next_buffer(m: Machine) -> None:
    m.spend(OPAQUE_BYTES)
    m.stack.append(Opaque("pickle.PickleBuffer"))


def readonly_buffer(m: Machine) -> None:
    m.top()


CALL_OPCODES: dict[str, Opcode] = {
    "c": global_, "\x93": stack_global, "R": reduce, "\x81": reduce, "\x92": newobj_ex, "b": build, "i": inst, "o": obj,
    "\x82": ext1, "\x83": ext2, "\x84": ext4, "P": persid, "Q": binpersid,
    "\x97": next_buffer, "\x98": readonly_buffer,
}  # fmt: skip
