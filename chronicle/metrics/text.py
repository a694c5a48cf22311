"""Logs as text: the lines of a file (gzip, UTF-16), and what a terminal or a collector puts around them."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PREFIX = re.compile(  # time, host and stream that a collector writes before each line
    r"^\[?(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d)\]?[ \t]"
    r"(?:std(?:out|err) [FP] )?(?:(?=[^ \t,;={]*[\d.-])[A-Za-z][\w.-]*:?[ \t](?:[\w./-]+\[\d+\]:[ \t])?)?"
)
WRAPPED = '{"log":"'  # a line of Docker's files, with the line of the container in it
SNIFF_BYTES = 1 << 16
GZIP_MARK = b"\x1f\x8b"
UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def is_gzip(path: Path) -> bool:
    """Whether a file is compressed with gzip, by its first bytes."""
    with open(path, "rb") as log:
        return log.read(2) == GZIP_MARK


def read_head(path: Path) -> bytes:
    """Return the first bytes of a log, decompressed; of a truncated gzip what it still holds."""
    if not is_gzip(path):
        with open(path, "rb") as log:
            return log.read(SNIFF_BYTES)
    with open(path, "rb") as packed:
        try:
            return zlib.decompressobj(wbits=31).decompress(packed.read(SNIFF_BYTES), SNIFF_BYTES)
        except zlib.error:
            return b""


def encoding_of(head: bytes) -> str:
    """How the text of a log is encoded, by its first bytes."""
    return "utf-16" if head.startswith(UTF_16_MARKS) else "utf-8"


def log_lines(path: Path, *, newline: str | None = None) -> Iterator[str]:
    """Yield the lines of a log as text; a truncated gzip ends where it is cut. Raises OSError when it cannot be read.

    Encodings are UTF-8 and the UTF-16 of a Windows shell; other bytes become replacement characters.
    """
    encoding = encoding_of(read_head(path))
    if not is_gzip(path):
        with open(path, encoding=encoding, errors="replace", newline=newline) as log:
            yield from log
        return
    with gzip.open(path, "rt", encoding=encoding, errors="replace", newline=newline) as packed:
        try:
            yield from packed
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return
