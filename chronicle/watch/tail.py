"""Read what was appended to a metrics log since the last look; a half line waits for its other half."""

from __future__ import annotations

from pathlib import Path

from chronicle.metrics.log import Point, parse_line

MAX_BYTES = 1 << 22  # per look: a supervisor that catches up must still read its ranks' output


class Tail:
    """Points of a growing `metrics.jsonl`; a file that does not exist yet has none, a truncated one starts anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
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
            point = parse_line(line, self._row)
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
