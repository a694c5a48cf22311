"""Follow something that grows: one launch of a run after the other, or a single file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from chronicle.metrics.log import Point
from chronicle.paths import RunPaths
from chronicle.watch.tail import Tail
from rollback.detect import Detector, Event


class Follower:
    """`look()` folds what is new and returns the events it opened or changed."""

    def __init__(self, read: Callable[[], list[Point]], ended: Callable[[], bool]) -> None:
        self._read, self.ended = read, ended
        self.detector = Detector()
        self.last: Point | None = None

    @property
    def rows(self) -> int:
        return self.detector.row

    def look(self) -> list[Event]:
        changed: dict[int, Event] = {}
        for point in self._read():
            self.last = point
            for event in self.detector.feed(point.step, point.values, time=point.time, launch=point.launch):
                changed[event.id] = event
        return list(changed.values())

    def status_line(self) -> str:
        """Where the log is now."""
        if self.last is None:
            return "no points yet"
        shown = [f"{name} {self.last.values[name]:.5g}" for name in ("loss", "lr", "grad_norm") if name in self.last.values]
        return f"step {self.last.step}  {'  '.join(shown)}"


def follow_file(path: Path) -> Follower:
    """Follow a `metrics.jsonl`; it never ends by itself."""
    return Follower(Tail(path).read, lambda: False)


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
