"""Read what was appended to a log since the last look; a half line waits for its other half."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from chronicle.metrics.records import TableLines
from chronicle.metrics.json_logs import parse_json_line
from chronicle.metrics.lines import parse_log_line
from chronicle.metrics.log import Point, parse_line
from chronicle.metrics.readers import UnknownLog, read_log

MAX_BYTES = 1 << 22  # per look: a supervisor that catches up must still read its ranks' output


class AnyLine:
    """Parse a line of any dialect that grows by lines: JSON, a table (its header comes first), printed lines."""

    def __init__(self) -> None:
        self._table = TableLines()

    def __call__(self, line: bytes, row: int) -> Point | None:
        if line.lstrip()[:1] == b"{":
            point = parse_line(line, row) or parse_json_line(line, row)
            if point is not None:
                return point
        point = self._table(line, row)
        if point is not None and point.values:
            return point
        point = parse_log_line(line.decode("utf-8", errors="replace"), row)
        return None if point is None else point._replace(row=row)


class Tail:
    """Points of a growing log; a file that does not exist yet has none, one that was cut or replaced starts anew."""

    def __init__(self, path: Path, parse: Callable[[bytes, int], Point | None] = parse_line) -> None:
        self.path = path
        self._parse = parse
        self._offset = 0
        self._inode: int | None = None
        self._rest = b""
        self._row = 0

    def read(self) -> list[Point]:
        """Return the points of the lines completed since the last call."""
        data = self._read_bytes()
        if not data:
            return []
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        points = []
        for line in lines:
            point = self._parse(line, self._row) if line else None
            if point is not None:
                self._row += 1
                points.append(point)
        return points

    def _read_bytes(self) -> bytes:
        try:
            with open(self.path, "rb") as log:
                inode = os.fstat(log.fileno()).st_ino
                if log.seek(0, 2) < self._offset or inode != self._inode:
                    self._offset, self._rest, self._inode = 0, b"", inode
                log.seek(self._offset)
                data = log.read(MAX_BYTES)
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        return data


class Reread:
    """Points of a log that does not grow by lines: read whole when it has changed, and only what is new is handed out.

    The newest point waits for the next one: event files write the channels of a step one after the other.
    """

    def __init__(self, path: Path, *, hold_last: bool) -> None:
        self.path, self._hold_last = path, hold_last
        self._seen, self._state = 0, (-1, -1)

    def read(self) -> list[Point]:
        """Return the points that were not there at the last call."""
        state = _state_of(self.path)
        if state == self._state:
            return []
        self._state = state
        try:
            points = list(read_log(self.path))
        except (UnknownLog, OSError):  # nothing yet, or just being written: it may read at the next look
            self._state = (-1, -1)
            return []
        if self._hold_last:
            del points[-1:]
        new, self._seen = points[self._seen :], max(self._seen, len(points))
        return new


def _state_of(path: Path) -> tuple[int, int]:
    """Bytes and newest change of a file (`mlflow.db#RUN`: the database) or of all files below a directory."""
    if not path.exists():
        path = Path(str(path).partition("#")[0])
    found = [path] if path.is_file() else [child for child in path.rglob("*") if child.is_file()]
    seen = [child.stat() for child in found]
    return sum(item.st_size for item in seen), max((item.st_mtime_ns for item in seen), default=0)
