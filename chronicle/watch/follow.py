"""Follow something that grows: one launch of a run after the other, or a single file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from chronicle.metrics.log import Point
from chronicle.metrics.mlflow_log import SQLITE_HEAD
from chronicle.metrics.opening import UTF_16_MARKS, is_gzip, read_head
from chronicle.metrics.tensorboard_log import is_event_file
from chronicle.paths import RunPaths
from chronicle.resume.checks.check import Check
from chronicle.watch.restart import LogRestart
from chronicle.watch.tail import AnyLine, Reread, Tail
from rollback.detect import Detector, Event


class Follower:
    """`look()` folds what is new and returns the events it opened or changed."""

    def __init__(self, read: Callable[[], list[Point]], ended: Callable[[], bool]) -> None:
        self._read, self.ended = read, ended
        self.detector = Detector()
        self._restarts = LogRestart()
        self.trips: list[tuple[int, Check]] = []  # (step of the restart, what tripped)
        self.last: Point | None = None

    @property
    def rows(self) -> int:
        return self.detector.row

    def look(self) -> list[Event]:
        changed: dict[int, Event] = {}
        for point in self._read():
            self.last = point
            self.trips += self._restarts.feed(point)
            for event in self.detector.feed(point.step, point.values, time=point.time, launch=point.launch):
                changed[event.id] = event
        return list(changed.values())

    def status_line(self) -> str:
        """Where the log is now."""
        if self.last is None:
            return "no points yet"
        shown = [f"{name} {self.last.values[name]:.5g}" for name in ("loss", "lr", "grad_norm") if name in self.last.values]
        return f"step {self.last.step}  {'  '.join(shown)}"


def follow_file(path: Path, *, once: bool = False) -> Follower:
    """Follow a log of any dialect; it never ends by itself. `once` says that nobody will look again."""
    if grows_by_lines(path):
        return Follower(Tail(path, AnyLine()).read, lambda: False)
    return Follower(Reread(path, hold_last=not once).read, lambda: False)


def grows_by_lines(path: Path) -> bool:
    """Whether a writer appends lines to it; databases, event files and whole JSON documents are read again."""
    if not path.is_file():
        return False
    head = read_head(path)
    document = path.suffix == ".json" and head.lstrip()[:1] in (b"{", b"[")
    packed = is_gzip(path) or head.startswith(UTF_16_MARKS)
    return not (document or packed or head.startswith(SQLITE_HEAD) or is_event_file(path))


def follow_run(paths: RunPaths) -> Follower:
    """Follow all launches of a run in order, new ones as they come."""
    tails: dict[int, Tail] = {}

    def read() -> list[Point]:
        names = [p.name for p in paths.launches_dir.iterdir()] if paths.launches_dir.is_dir() else []
        points: list[Point] = []
        for launch in sorted(int(name) for name in names if name.isdecimal()):
            tail = tails.setdefault(launch, Tail(paths.metrics_path(launch)))
            points += [point._replace(launch=launch) for point in tail.read()]
        return points

    return Follower(read, lambda: False)
