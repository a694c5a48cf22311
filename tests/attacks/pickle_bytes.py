"""Pickles put together opcode by opcode, as no pickler would write them."""

from __future__ import annotations

import struct

PROTO2 = b"\x80\x02"
PROTO4 = b"\x80\x04"
STOP = b"."


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def name(module: str, attribute: str) -> bytes:
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def call(module: str, attribute: str, *arguments: bytes) -> bytes:
    """`module.attribute(*arguments)` by REDUCE."""
    return name(module, attribute) + b"(" + b"".join(arguments) + b"tR"


def integer(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def real(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


def items(**parts: bytes) -> bytes:
    """A dict with string keys."""
    return b"}(" + b"".join(text(key) + value for key, value in parts.items()) + b"u"


def elements(*parts: bytes) -> bytes:
    return b"](" + b"".join(parts) + b"e"


def pickled(body: bytes, protocol: bytes = PROTO2) -> bytes:
    return protocol + body + STOP


def optimizer(**first_group: bytes) -> bytes:
    """An optimizer's state dict whose only group is `first_group`."""
    return items(state=b"}", param_groups=elements(items(**first_group)))


def scheduler(**fields: bytes) -> bytes:
    """A scheduler's state dict, with its usual counters unless given."""
    usual = {"last_epoch": integer(10), "_step_count": integer(11), "base_lrs": elements(real(1e-3))}
    return items(**{**usual, **fields})
