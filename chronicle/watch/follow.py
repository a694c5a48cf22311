"""Follow a growing log or run: a `Scan` that is given what was appended since the last look.

A line without its end waits for the rest. Files that do not grow by lines (databases, event files, JSON documents) are
read again when they change.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from chronicle.journal import read_journal
from chronicle.journal.events import EntryKind
from chronicle.launch.output import LineTail
from chronicle.metrics.log import Point, parse_line
from chronicle.metrics.readers import BINARY, PLAIN, AnyLine, LogReading, UnknownLog, form_of, read_log, unread_log
from chronicle.metrics.text import UTF_16_MARKS, is_gzip, read_head
from chronicle.paths import RunPaths, list_launch_numbers
from chronicle.watch.scan import Scan, advice_on_file, advice_on_run, breaches_of


def follow_file(
    path: Path, *, once: bool = False, checkpoints_dir: Path | None = None, reading: LogReading = PLAIN
) -> Scan:
    """Follow a log of any known format. `once`: the last point of one that is read whole is not held back."""
    whole = Reread(path, hold_last=not once, reading=reading)
    read = Tail(path, AnyLine(reading)).read if grows_by_lines(path) else whole.read
    scan = Scan(str(path), read, advice_on_file(checkpoints_dir), form=form_of(path, reading), reading=reading)
    scan.contents.left_out = whole.left_out
    return scan


def grows_by_lines(path: Path) -> bool:
    """Whether a log is written line by line; databases, event files and JSON documents are not, nor what is packed."""
    if not path.is_file() or form_of(path) in (*BINARY, "JSON"):
        return False
    return not (is_gzip(path) or read_head(path).startswith(UTF_16_MARKS))


def why_unread(path: Path, reading: LogReading) -> UnknownLog | None:
    """Why no point was read from a log that holds something; None of one that is empty, or a table without rows yet."""
    if path.is_file() and (not path.stat().st_size or form_of(path, reading) == "table"):
        return None
    return unread_log(path, reading)


def follow_run(
    paths: RunPaths, checkpoints_dir: Path | None = None, *, options: tuple[str, ...] = (), reading: LogReading = PLAIN
) -> Scan:
    """Follow all launches of a run in order, new ones as they come."""
    tails: dict[int, Tail] = {}

    def read() -> list[Point]:
        points: list[Point] = []
        for launch in list_launch_numbers(paths):
            tail = tails.setdefault(launch, Tail(paths.metrics_path(launch)))
            points += [point._replace(launch=launch) for point in tail.read()]
        return points

    advise = advice_on_run(paths, checkpoints_dir, options)
    return Scan(paths.run, read, advise, reading=reading, more=lambda events: breaches_of(paths)(events))


def how_ended(paths: RunPaths) -> str:
    """How the newest launch ended, in its entry's words; "" while it runs or is started again."""
    told = list(read_journal(paths).of_kind(EntryKind.LAUNCH_START, EntryKind.LAUNCH_END, EntryKind.RESTART))
    if not told or told[-1].kind == EntryKind.LAUNCH_START or str(told[-1].data.get("decision")).startswith("again"):
        return ""
    return told[-1].title or f"launch {told[-1].launch} ended"


# --- Tail: the points appended since the last look


class Tail:
    """Points of a growing log; a missing file has none, and one that was truncated or replaced is read from its start."""

    def __init__(self, path: Path, parse: Callable[[bytes, int], Point | None] = parse_line) -> None:
        self._lines = LineTail(path)
        self._parse = parse
        self._row = 0

    def read(self) -> list[Point]:
        """Return the points of the lines completed since the last call."""
        points = []
        for line in self._lines.read():
            point = self._parse(line, self._row)
            if point is not None:
                self._row += 1
                points.append(point)
        return points


class Reread:
    """Points of a log that is not written line by line: it is read whole when it has changed, and new points are returned.

    `hold_last` keeps the newest point back until the next one: event files write the channels of a step one by one.
    """

    def __init__(self, path: Path, *, hold_last: bool, reading: LogReading = PLAIN) -> None:
        self.path, self._hold_last, self._reading = path, hold_last, reading
        self.left_out: list[str] = []  # at the last look
        self._seen, self._state = 0, (-1, -1)

    def read(self) -> list[Point]:
        """Return the points that are new since the last call."""
        state = _state_of(self.path)
        if state == self._state:
            return []
        self._state = state
        self.left_out.clear()
        try:
            points = list(read_log(self.path, self._reading, self.left_out))
        except (UnknownLog, OSError):  # nothing yet, or being written right now: try again at the next look
            self._state = (-1, -1)
            return []
        if self._hold_last:
            del points[-1:]
        new, self._seen = points[self._seen :], max(self._seen, len(points))
        return new


def _state_of(path: Path) -> tuple[int, int]:
    """Return size and newest change of a file (`mlflow.db#RUN`: the database) or of all files below a directory."""
    if not path.exists():
        path = Path(str(path).partition("#")[0])
    found = [path] if path.is_file() else [child for child in path.rglob("*") if child.is_file()]
    seen = [child.stat() for child in found]
    return sum(item.st_size for item in seen), max((item.st_mtime_ns for item in seen), default=0)
