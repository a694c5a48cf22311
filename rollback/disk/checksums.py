"""CRC-32 of parts of files, computed on all cores; verification spends most of its time here.

Long parts are cut into spans that any core may take; the CRC of the whole follows from those of the spans. Threads are
enough: reading and `zlib.crc32` release the interpreter's lock. The CRC of a patched file follows from its old CRC and
the changed bytes.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollback.errors import UnreadableFile

if TYPE_CHECKING:
    from concurrent.futures import Executor

_SPAN_BYTES = 128 * 2**20
_BUFFER_BYTES = 2**20  # stays in the processor's cache between the read and the checksum

ByteProgress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksumTarget:
    """Names `length` bytes at `offset` of a file that should have the CRC-32 `expected`.

    `name` is the file's name in the checkpoint, `label` what these bytes are.
    """

    path: Path
    name: str
    label: str
    offset: int
    length: int
    expected: int


@dataclass(frozen=True, slots=True)
class _Span:
    path: Path
    offset: int
    length: int


def wrong_checksums(
    targets: Sequence[ChecksumTarget], executor: Executor | None = None, progress: ByteProgress | None = None
) -> list[tuple[ChecksumTarget, int]]:
    """The targets whose bytes have another CRC-32, with the one that was found. UnreadableFile when one ends early."""
    spans = [(target, span) for target in targets for span in _spans(target)]
    crcs = (executor.map if executor else map)(lambda span: _crc_of(span, progress), [span for _, span in spans])
    found = {id(target): 0 for target in targets}
    for (target, span), crc in zip(spans, crcs, strict=True):
        found[id(target)] = crc32_combine(found[id(target)], crc, span.length)
    return [(target, found[id(target)]) for target in targets if found[id(target)] != target.expected]


def _spans(target: ChecksumTarget) -> list[_Span]:
    starts = range(0, target.length, _SPAN_BYTES)
    return [_Span(target.path, target.offset + at, min(_SPAN_BYTES, target.length - at)) for at in starts]


_local = threading.local()


def _buffer() -> bytearray:
    """One buffer a thread: allocating a new one for every read costs as much as the checksum."""
    if not hasattr(_local, "buffer"):
        _local.buffer = bytearray(_BUFFER_BYTES)
    buffer: bytearray = _local.buffer
    return buffer


def _crc_of(span: _Span, progress: ByteProgress | None) -> int:
    view = memoryview(_buffer())
    fd = os.open(span.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        at, left, crc = span.offset, span.length, 0
        while left:
            count = os.preadv(fd, [view[: min(left, _BUFFER_BYTES)]], at)
            if not count:
                raise UnreadableFile(f"`{span.path}` ends at byte {at}: expected {left} more bytes")
            crc = zlib.crc32(view[:count], crc)
            at, left = at + count, left - count
            if progress is not None:
                progress(count)
        return crc
    except OSError as problem:
        raise UnreadableFile(f"`{span.path}` cannot be read: {problem.strerror}") from None
    finally:
        os.close(fd)


# --- Arithmetic of CRC-32: joining two, and changing bytes

_POLYNOMIAL = 0xEDB88320  # reflected: the highest power is the lowest bit
_ONE = 0x80000000


def crc32_after(crc: int, size_bytes: int, changes: Iterable[tuple[int, bytes, bytes]]) -> int:
    """CRC-32 of a file of `size_bytes` whose CRC-32 was `crc`, after each (offset, old, new) was written."""
    for offset, old, new in changes:
        difference = bytes(x ^ y for x, y in zip(old, new, strict=True))
        bare = zlib.crc32(difference) ^ zlib.crc32(bytes(len(difference)))  # start value and final inversion cancel out
        crc ^= _times(bare, _power(8 * (size_bytes - offset - len(old))))
    return crc


def crc32_combine(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 of two pieces put together, from the CRC-32 of each and the length of the second."""
    return _times(first, _power(8 * second_bytes)) ^ second


def _times(a: int, b: int) -> int:
    """Product of two polynomials modulo the CRC's."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _power(exponent: int) -> int:
    """x to that power, modulo the polynomial."""
    result, square = _ONE, _ONE >> 1  # 1 and x
    while exponent:
        if exponent & 1:
            result = _times(result, square)
        square = _times(square, square)
        exponent >>= 1
    return result
