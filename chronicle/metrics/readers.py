"""Open any training log: decide what it is by its first bytes and hand it to its reader.

Encoding errors, half lines and garbage never stop a reader: what is not understood is passed over. A file in which
nothing is understood is an error that says what was tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from chronicle.errors import ChronicleError
from chronicle.metrics.csv_log import STEP_NAMES, read_csv
from chronicle.metrics.log import Point, read_metrics

SNIFF_BYTES = 4096


class UnknownLog(ChronicleError):
    """No reader knows this file."""


def read_log(path: Path) -> Iterator[Point]:
    """Yield the points of a log in file order; raises UnknownLog and OSError."""
    head = _read_head(path)
    if head.lstrip().startswith(b"{"):
        yield from read_metrics(path)
    elif _is_table(head):
        yield from read_csv(path)
    else:
        raise UnknownLog(f"`{path}` is no training log that is known: expected JSONL or CSV with a step column")


def _read_head(path: Path) -> bytes:
    with open(path, "rb") as log:
        return log.read(SNIFF_BYTES)


def _is_table(head: bytes) -> bool:
    first = head.split(b"\n", 1)[0].decode("utf-8", errors="replace").lower()
    names = {name.strip().strip('"\ufeff') for name in first.replace(";", ",").replace("\t", ",").split(",")}
    return len(names) > 1 and bool(names & {*STEP_NAMES, "loss"})
