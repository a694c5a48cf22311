"""Opcodes of the memo, of framing and of the stack itself."""

from __future__ import annotations

from rollback.files.constants import _U32, _U64
from rollback.files.pickle_machine import Frame, Machine, Opcode, PickleEndsEarly
from rollback.files.pickle_values import StoredInt

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
