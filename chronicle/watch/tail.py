"""Read what was appended to a log since the last look; a half line waits for its other half."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from chronicle.metrics.lines import parse_log_line
from chronicle.metrics.log import Point, parse_line

MAX_BYTES = 1 << 22  # per look: a supervisor that catches up must still read its ranks' output


def parse_printed(line: bytes, row: int) -> Point | None:
    """A printed line as a point; a line that names no step is counted."""
    point = parse_log_line(line.decode("utf-8", errors="replace"), row)
    return None if point is None else point._replace(row=row)


class Tail:
    """Points of a growing log; a file that does not exist yet has none, a truncated one starts anew."""

    def __init__(self, path: Path, parse: Callable[[bytes, int], Point | None] = parse_line) -> None:
        self.path = path
        self._parse = parse
        self._offset = 0
        self._rest = b""
        self._row = 0

    def read(self) -> list[Point]:
        """Return the points of the lines completed since the last call."""
        data = self._read_bytes()
        if not data:
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        points = []
        for line in lines:
            point = self._parse(line, self._row)
            if point is not None:
                self._row += 1
                points.append(point)
        return points

    def _read_bytes(self) -> bytes:
        try:
            with open(self.path, "rb") as log:
                if log.seek(0, 2) < self._offset:
                    self._offset, self._rest = 0, b""
                log.seek(self._offset)
                data = log.read(MAX_BYTES)
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        return data
