"""Where on the curve a moment lies: the launch and step that were running then, read from the per-step logs."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from chronicle.metrics.log import read_metrics
from chronicle.paths import RunPaths

__all__ = ["find_step", "guess_year"]

NUMBER = re.compile(r"\d{4,}")


def find_step(paths: RunPaths, moment: datetime) -> tuple[int, int] | None:
    """(launch, last step logged before `moment`) of the launch that was running; None outside every launch."""
    when = _seconds(moment)
    for number in _launches(paths):
        before = None
        try:
            for point in read_metrics(paths.metrics_path(number)):
                if point.time is None:
                    continue
                if point.time > when:
                    if before is not None:
                        return number, before
                    break
                before = point.step
        except OSError:
            continue
    return None


def guess_year(paths: RunPaths, now: datetime) -> int:
    """The year a syslog line of this run belongs to: that of the run's first logged step, else this year."""
    for number in _launches(paths):
        try:
            for point in read_metrics(paths.metrics_path(number)):
                if point.time is not None:
                    return datetime.fromtimestamp(point.time, UTC).year
        except OSError:
            continue
    return now.year


def _launches(paths: RunPaths) -> list[int]:
    if not paths.launches_dir.is_dir():
        return []
    return sorted(int(one.name) for one in paths.launches_dir.iterdir() if NUMBER.fullmatch(one.name))


def _seconds(moment: datetime) -> float:
    """Kernel logs are written in UTC unless they say otherwise."""
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
