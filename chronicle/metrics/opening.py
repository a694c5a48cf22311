"""Open a log as text: gzip or plain, UTF-8 or the UTF-16 of a Windows shell; bytes that are neither become marks."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

SNIFF_BYTES = 1 << 16
GZIP_MARK = b"\x1f\x8b"
UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def is_gzip(path: Path) -> bool:
    with open(path, "rb") as log:
        return log.read(2) == GZIP_MARK


def read_head(path: Path) -> bytes:
    """The first bytes of the log, unpacked; what a torn gzip still holds."""
    if not is_gzip(path):
        with open(path, "rb") as log:
            return log.read(SNIFF_BYTES)
    with open(path, "rb") as packed:
        try:
            return zlib.decompressobj(wbits=31).decompress(packed.read(SNIFF_BYTES), SNIFF_BYTES)
        except zlib.error:
            return b""


def log_lines(path: Path, *, newline: str | None = None) -> Iterator[str]:
    """The lines of the log, as text; a torn gzip ends where it is torn. Raises OSError when it cannot be read."""
    encoding = "utf-16" if read_head(path).startswith(UTF_16_MARKS) else "utf-8"
    if not is_gzip(path):
        with open(path, encoding=encoding, errors="replace", newline=newline) as log:
            yield from log
        return
    with gzip.open(path, "rt", encoding=encoding, errors="replace", newline=newline) as packed:
        try:
            yield from packed
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return
