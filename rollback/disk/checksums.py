"""CRC-32 of parts of files, on all cores: what verification spends its time on.

Long parts are cut into spans that any core may take; the CRC of the whole follows from those of the spans. Threads are
enough: reading and `zlib.crc32` let go of the interpreter's lock.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollback.disk.crc import crc32_combine
from rollback.errors import UnreadableFile

if TYPE_CHECKING:
    from concurrent.futures import Executor

SPAN_BYTES = 128 * 2**20
BUFFER_BYTES = 2**20  # stays in the processor's cache between the read and the checksum

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksumTarget:
    """`length` bytes at `offset` of a file that should have the CRC-32 `expected`.

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
    targets: Sequence[ChecksumTarget], executor: Executor | None = None, progress: Progress | None = None
) -> list[tuple[ChecksumTarget, int]]:
    """The targets whose bytes have another CRC-32, with the one that was found. UnreadableFile when one ends early."""
    spans = [(target, span) for target in targets for span in _spans(target)]
    crcs = (executor.map if executor else map)(lambda span: _crc_of(span, progress), [span for _, span in spans])
    found = {id(target): 0 for target in targets}
    for (target, span), crc in zip(spans, crcs, strict=True):
        found[id(target)] = crc32_combine(found[id(target)], crc, span.length)
    return [(target, found[id(target)]) for target in targets if found[id(target)] != target.expected]


def _spans(target: ChecksumTarget) -> list[_Span]:
    starts = range(0, target.length, SPAN_BYTES)
    return [_Span(target.path, target.offset + at, min(SPAN_BYTES, target.length - at)) for at in starts]


_local = threading.local()


def _buffer() -> bytearray:
    """One buffer a thread: allocating a new one for every read costs as much as the checksum."""
    if not hasattr(_local, "buffer"):
        _local.buffer = bytearray(BUFFER_BYTES)
    buffer: bytearray = _local.buffer
    return buffer


def _crc_of(span: _Span, progress: Progress | None) -> int:
    view = memoryview(_buffer())
    fd = os.open(span.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        at, left, crc = span.offset, span.length, 0
        while left:
            count = os.preadv(fd, [view[: min(left, BUFFER_BYTES)]], at)
            if not count:
                raise UnreadableFile(f"`{span.path}` ends at byte {at}: {left} more bytes were expected")
            crc = zlib.crc32(view[:count], crc)
            at, left = at + count, left - count
            if progress is not None:
                progress(count)
        return crc
    except OSError as problem:
        raise UnreadableFile(f"`{span.path}` cannot be read: {problem.strerror}") from None
    finally:
        os.close(fd)
