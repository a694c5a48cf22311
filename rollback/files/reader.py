"""A pickle read opcode by opcode into plain values: a stack machine that can build, but cannot import or call.

The opcodes and their arguments are those of Python's `pickletools` (protocols 0 to 5). Three things differ from an
unpickler: a GLOBAL stays a name, a REDUCE stays a description (`rollback.files.globals` knows the few that matter),
and every number keeps the place of its bytes. Reading is bounded in memory, and so in time. Whatever breaks a rule
raises UnreadableFile; nothing else may escape.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

from rollback.files.calls import CALL_OPCODES
from rollback.files.constants import CONSTANT_OPCODES
from rollback.files.pickle_reader import CONTAINER_OPCODES
from rollback.files.pickle_machine import OPCODE_BYTES, Frame, Limits, Machine, Opcode, PickleEndsEarly
from rollback.files.memory import MEMO_OPCODES
from rollback.files.pickle_values import TensorRef

__all__ = ["Frame", "Limits", "PickleContent", "PickleEndsEarly", "read_pickle"]

STOP = 0x2E
BATCH = 1024  # opcodes paid for at once

TABLE: list[Opcode | None] = [None] * 256
for _code, _opcode in (CONSTANT_OPCODES | CONTAINER_OPCODES | CALL_OPCODES | MEMO_OPCODES).items():
    TABLE[ord(_code)] = _opcode


@dataclass(frozen=True, slots=True, kw_only=True)
class PickleContent:
    """One pickle: its value, where it ends, its frames, the tensors and the globals it names."""

    value: object
    end: int
    frames: tuple[Frame, ...]
    tensors: tuple[TensorRef, ...]
    globals: frozenset[str]
    num_bytes: int  # what it took of its limit


def read_pickle(data: bytes, *, start: int = 0, segment: int = 0, limits: Limits | None = None) -> PickleContent:
    """Read the pickle that starts at `start`; places are offsets into `data` and carry `segment`.

    Raises UnreadableFile with the byte position of what is wrong.
    """
    machine = Machine(data, start, segment, limits or Limits())
    machine.spend(len(data))
    collecting = gc.isenabled()
    gc.disable()  # a pickle only builds: the collector would walk all of it again and again
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
    data, table = machine.data, TABLE
    try:
        while True:
            machine.spend(BATCH * OPCODE_BYTES)
            for done in range(1, BATCH + 1):
                opcode = data[machine.pos]
                machine.pos += 1
                if opcode == STOP:
                    machine.left += (BATCH - done) * OPCODE_BYTES
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
