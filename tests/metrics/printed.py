"""Printed lines read by themselves, for the tests of the line reader."""

from collections.abc import Iterable, Iterator

from chronicle.metrics.lines import PrintedLines
from chronicle.metrics.log import Point


def read_lines(lines: Iterable[str]) -> Iterator[Point]:
    """Yield the points of printed lines."""
    log = PrintedLines()
    for line in lines:
        yield from log.feed(line)
    yield from log.flush()


def parse_log_line(line: str, counted: int = 0) -> Point | None:
    """Parse one printed line by itself; `counted` is the step of a line that names none."""
    return PrintedLines(counted=counted).parse(line if line.endswith("\n") else f"{line}\n")
