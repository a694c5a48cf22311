"""The lineage as a store of another tracker: W&B's offline directories and trackio's database, by their own packages.

One run a launch, all in one group that is called as the run is. Steps that a rollback left behind are there under
`abandoned/<name>`, so a chart of `loss` over the group shows each step once, from the launch that the weights descend from.
The ids are made of the journal's first entry and the launch: exporting again, and syncing again, is the same run there.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.paths import RunPaths
from chronicle.story import LaunchStory, Story
from chronicle.story.curve import CurveRow, canonical_rows
from chronicle.story.launch_settings import plain_settings, settings_of

MARK = ".chronicle-export"  # in a directory that an earlier export made, and only there
ABANDONED = "abandoned/"


def write_wandb(story: Story, paths: RunPaths, directory: Path) -> int:
    """Write `directory/wandb/offline-run-*`, one for each launch with steps; returns the number of rows. Nothing is sent.

    Raises `ChronicleError` where the wandb package is not installed, or the directory is not one of ours.
    """
    wandb = _package("wandb")
    _begin(directory)
    quiet = {"console": "off", "silent": True, "disable_git": True, "save_code": False, "x_disable_stats": True}
    count = 0
    for launch, rows in _launches(story, paths):
        known = {name: value for name, value in quiet.items() if hasattr(wandb.Settings(), name)}
        run = wandb.init(
            mode="offline", dir=str(directory), project=story.run, group=story.run, id=_id(story, launch),
            name=f"{story.run}-launch-{launch.number}", config=_config(story, launch), tags=_tags(launch),
            settings=wandb.Settings(**known), reinit="finish_previous",
        )  # fmt: skip
        for row in rows:
            time = {} if row.time is None else {"_timestamp": row.time}
            run.log({**_named(row), **time}, step=row.step)
            count += 1
        run.finish(exit_code=launch.exit_code or 0)
    wandb.teardown()  # its service may still be writing the last file when `finish` returns
    return count


def write_trackio(story: Story, paths: RunPaths, directory: Path) -> int:
    """Write `directory/<run>.db`, a project with one run for each launch; returns the number of rows.

    Raises `ChronicleError` where the trackio package is not installed, or the directory is not one of ours.
    """
    _begin(directory)
    if "trackio" not in sys.modules:
        os.environ["TRACKIO_DIR"] = str(directory.absolute())  # read once, when it is imported
    _package("trackio")
    from trackio import sqlite_storage, utils

    utils.TRACKIO_DIR = sqlite_storage.TRACKIO_DIR = directory.absolute()
    count = 0
    for launch, rows in _launches(story, paths):
        held = list(rows)
        moments = [datetime.fromtimestamp(row.time or 0.0, UTC).isoformat() for row in held]
        sqlite_storage.SQLiteStorage.bulk_log(
            story.run, f"launch-{launch.number}", [_named(row) for row in held], [row.step for row in held], moments,
            {**_config(story, launch), "_Group": story.run}, run_id=_id(story, launch),
        )  # fmt: skip
        count += len(held)
    return count


def _package(name: str) -> Any:
    try:
        return __import__(name)
    except ModuleNotFoundError as problem:
        raise ChronicleError(f"cannot write for {name}: its package is not installed", f"pip install {name}") from problem


def _begin(directory: Path) -> None:
    """An empty directory: what an earlier export wrote is removed, anything else is left alone and refused."""
    if directory.exists():
        if not directory.is_dir() or (any(directory.iterdir()) and not (directory / MARK).exists()):
            raise ChronicleError(f"`{directory}` exists and chronicle did not write it", "name another directory with -o")
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    (directory / MARK).touch()


def _launches(story: Story, paths: RunPaths) -> Iterator[tuple[LaunchStory, Iterator[CurveRow]]]:
    rows: dict[int, list[CurveRow]] = {}
    for row in canonical_rows(paths, story.lineage, abandoned=True):
        rows.setdefault(row.launch, []).append(row)
    for launch in story.launches:
        if launch.number in rows:
            yield launch, iter(rows[launch.number])


def _id(story: Story, launch: LaunchStory) -> str:
    return f"{story.entries[0].id.lower()}-{launch.number}"


def _named(row: CurveRow) -> dict[str, float]:
    return dict(row.values) if row.kept else {f"{ABANDONED}{name}": value for name, value in row.values.items()}


def _config(story: Story, launch: LaunchStory) -> dict[str, Any]:
    span = launch.span
    told: Mapping[str, Any] = {
        "chronicle.launch": launch.number, "chronicle.start_step": span.start_step, "chronicle.parent_launch": span.parent,
        "chronicle.abandoned_after": span.abandoned_after,
        "chronicle.lr_factor": None if launch.lr is None else launch.lr.factor,
    }  # fmt: skip
    known = {name: value for name, value in told.items() if value is not None}
    return json.loads(json.dumps({**plain_settings(settings_of(story.entries, launch.number)), **known}))  # type: ignore[no-any-return]


def _tags(launch: LaunchStory) -> list[str]:
    return ["chronicle", *(["abandoned"] if launch.span.abandoned_after is not None else [])]
