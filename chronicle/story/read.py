"""Read a run's story from disk: journal, the ends of each per-step log, signs of life. The edge around `assemble`."""

import re
import time
from collections.abc import Callable, Mapping, Sequence

from chronicle.journal import Journal, read_journal
from chronicle.journal.index import open_index
from chronicle.launch.heartbeat import FRESH_SECONDS, read_heartbeats
from chronicle.metrics import Point
from chronicle.paths import RunPaths
from chronicle.story.assemble import Story, assemble, with_checkpoint
from chronicle.story.measurements import ends_of, points_until

__all__ = ["BRIEF_KINDS", "observed_steps", "read_brief_story", "read_story"]

BRIEF_KINDS = (  # what lineage, ledger, open matters and proposals are folded from
    *("run.init", "launch.start", "launch.step", "launch.end", "guard.verdict", "lr.mismatch", "incident", "close"),
    *("rollback.intent", "rollback.receipt", "undo.intent", "undo.receipt", "recover.receipt", "proposal", "verified"),
)

LAUNCH_DIR = re.compile(r"\d{4,}")


def read_story(
    paths: RunPaths,
    *,
    journal: Journal | None = None,
    saved: Mapping[int, int] | None = None,
    signs_of_life: bool = True,
    clock: Callable[[], float] = time.time,
) -> Story:
    """The whole story; a run without anything is an empty story, not an error.

    Without `signs_of_life` it depends on what is recorded alone: a rendered page must not change while nothing happens.
    """
    journal = read_journal(paths) if journal is None else journal

    def until(launch: int, step: int) -> Sequence[Point]:
        return points_until(paths.metrics_path(launch), step)

    alive = _alive(paths, clock()) if signs_of_life else ()
    return assemble(journal, observed_steps(paths), until, alive, saved)


def read_brief_story(paths: RunPaths) -> Story:
    """The story as far as `status` needs it: of a large journal only the kinds that it is folded from are read."""
    index = open_index(paths)
    if index is None:
        return read_story(paths)
    try:
        story = read_story(paths, journal=index.journal(BRIEF_KINDS), saved=index.last_saved())
        for interval in reversed(story.lineage.kept):
            saved = index.last_checkpoint(interval.launch, interval.first, interval.last)
            if saved is not None:
                return with_checkpoint(story, saved)
        return story
    finally:
        index.close()


def observed_steps(paths: RunPaths) -> dict[int, tuple[int, int]]:
    """First and last logged step of every launch that has a per-step log."""
    try:
        names = sorted(entry.name for entry in paths.launches_dir.iterdir())
    except OSError:
        return {}
    numbers = [int(name) for name in names if LAUNCH_DIR.fullmatch(name)]
    return {n: ends for n in numbers if (ends := ends_of(paths.metrics_path(n))) is not None}


def _alive(paths: RunPaths, now: float) -> list[int]:
    return [beat.launch for beat in read_heartbeats(paths.heartbeats_dir) if beat.age(now) < FRESH_SECONDS]
