"""What each rollback threw away in wall-clock time, read off the per-step logs. The edge of an otherwise pure package."""

from collections.abc import Iterator

from chronicle.paths import RunPaths
from chronicle.story.assemble import Story
from chronicle.story.measurements import points_until

__all__ = ["lost_seconds"]


def lost_seconds(story: Story, paths: RunPaths) -> dict[str, float]:
    """Rollback entry id -> seconds between first passing its target and the step that was thrown away, where known."""
    return dict(_pairs(story, paths))


def _pairs(story: Story, paths: RunPaths) -> Iterator[tuple[str, float]]:
    for mark in story.lineage.rollbacks:
        end, begin = _time(paths, mark.from_launch, mark.from_step), _time(paths, mark.to_launch, mark.to_step)
        if end is not None and begin is not None and end >= begin:
            yield mark.entry_id, end - begin


def _time(paths: RunPaths, launch: int | None, step: int) -> float | None:
    points = [] if launch is None else points_until(paths.metrics_path(launch), step, 1)
    return points[-1].time if points else None
