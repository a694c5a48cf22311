"""Runs from outside: `chronicle.open("logs/tr-190")` reads one, `list_runs` all of a directory.

Numbers are told with the honesty of the other views: `curve` holds each step once, from the launch that the present weights
descend from; what a rollback left behind is there only when it is asked for.

    run = chronicle.open("logs/tr-190")
    pandas.DataFrame(run.curve("loss").columns())
"""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from chronicle.errors import ChronicleError
from chronicle.journal import Entry, JournalWriter, Lineage
from chronicle.journal.events import EntryKind, Note, events_of, words_of
from chronicle.journal.place import Parent, Place, read_place
from chronicle.paths import RunPaths
from chronicle.settings import load_settings
from chronicle.story import Story
from chronicle.story.assemble import LaunchStory
from chronicle.story.curve import canonical_rows, channel_names
from chronicle.story.launch_settings import settings_of
from chronicle.story.read import read_story
from rollback.channels import Role, canonical_name, find_channel, role_of


class LoggedCurve(NamedTuple):
    """One channel as columns of equal length, in step order along the lineage.

    `time`: seconds since the epoch, or None. `kept`: whether the present weights descend from the point.
    """

    channel: str
    step: list[int]
    value: list[float]
    launch: list[int]
    time: list[float | None]
    kept: list[bool]

    def columns(self) -> dict[str, list[Any]]:
        """The columns by name, as `pandas.DataFrame` and `polars.DataFrame` take them."""
        return {
            "step": self.step,
            self.channel: self.value,
            "launch": self.launch,
            "time": self.time,
            "kept": self.kept,
        }

    def __len__(self) -> int:
        return len(self.step)


class Run:
    """One run, read from its directory. Nothing is written. What was read is kept: open it again to see what came since."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.name = paths.run

    @cached_property
    def story(self) -> Story:
        """All that the views tell of this run."""
        return read_story(self.paths)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries of the journal in order."""
        return self.story.entries

    @property
    def launches(self) -> tuple[LaunchStory, ...]:
        """The launches in order of their numbers."""
        return self.story.launches

    def launch(self, number: int | None) -> int:
        """The number, or that of the last launch; raises `ChronicleError` where the run has none of it."""
        numbers = [launch.number for launch in self.launches]
        if not numbers:
            raise ChronicleError(f"run `{self.name}` has no launch", "name a run that was launched")
        if number is None:
            return numbers[-1]
        if number not in numbers:
            found = ", ".join(map(str, numbers[-8:]))
            raise ChronicleError(f"run `{self.name}` has no launch {number}: it has {found}", "name one of them")
        return number

    @property
    def lineage(self) -> Lineage:
        """Which launch the present weights have each step from."""
        return self.story.lineage

    @cached_property
    def run_id(self) -> str | None:
        """The id that checkpoints and forks of this run carry; None for a run of an old version."""
        place = read_place(self.paths)
        return None if place is None else place.run_id

    @property
    def parent(self) -> Parent | None:
        """The run that this one began from: by a checkpoint that it loaded, or as a copy of its directory."""
        return _parent_of(self.story, read_place(self.paths))

    @cached_property
    def channels(self) -> tuple[str, ...]:
        """Every logged name, in order of first appearance."""
        rows = canonical_rows(self.paths, self.lineage, abandoned=True)
        return tuple(channel_names(rows))

    def curve(self, channel: str = "loss", *, abandoned: bool = False, launch: int | None = None) -> LoggedCurve:
        """One channel over the lineage, each step once; with `abandoned`, every point of every launch, or of one `launch`.

        A name that was not logged may name a role: `loss` finds `train/loss`, where that is the run's training loss.
        Raises `ChronicleError`, which lists the channels, for any other name.
        """
        found = LoggedCurve(channel, [], [], [], [], [])
        for row in canonical_rows(self.paths, self.lineage, abandoned=abandoned or launch is not None):
            value = row.values.get(channel)
            if value is not None and launch in (None, row.launch):
                found.step.append(row.step)
                found.value.append(value)
                found.launch.append(row.launch)
                found.time.append(row.time)
                found.kept.append(row.kept)
        if found.step or channel in self.channels:
            return found
        role = role_of(channel)
        other = (
            find_channel(self.channels, role)
            if canonical_name(channel) == channel and role is not Role.IGNORED
            else None
        )
        if other is None:
            some = ", ".join(f"`{name}`" for name in self.channels[:12]) or "none"
            raise ChronicleError(f"run `{self.name}` has no channel `{channel}`: logged are {some}", "name one of them")
        return self.curve(other, abandoned=abandoned, launch=launch)

    def settings(self, launch: int | None = None) -> dict[str, Any]:
        """The flat settings of a launch, of the last one by default: arguments, recorded settings, code and host."""
        number = launch if launch is not None else (self.launches[-1].number if self.launches else 0)
        return settings_of(self.entries, number)

    def summary(self) -> dict[str, Any]:
        """One row of `chronicle runs`: state, step, last values, counts and tags."""
        return summarize_run(self.paths, self.story)


def open(named: str | os.PathLike[str], *, logs: Path | None = None) -> Run:
    """The run in this directory (`logs/tr-190`), or of this name in `logs`: those of the project here, where none are named.

    Raises `ChronicleError` where no journal lies, with the runs that are near.
    """
    words = os.fspath(named)
    paths = RunPaths(Path(words).absolute())
    if not paths.journal_dir.is_dir() and "/" not in words:
        directory = logs or load_settings(Path.cwd(), os.environ, run="any").logs_dir
        paths = RunPaths(directory / words)
    if not paths.journal_dir.is_dir():
        raise no_such_run(paths)
    return Run(paths)


def no_such_run(paths: RunPaths, origin: str = "") -> ChronicleError:
    """There is no such run: the nearest ones."""
    known = [one.run for one in list_runs(paths.run_dir) or list_runs(paths.run_dir.parent)]
    near = difflib.get_close_matches(paths.run, known, n=3) or known[:8]
    found = ", ".join(f"`{one}`" for one in near) or "no run at all"
    way_out = "name one of them, or another directory with --logs DIR; `chronicle run -- …` starts one"
    return ChronicleError(f"no run `{paths.run}`{origin} in `{paths.run_dir.parent}`: found {found}", way_out)


def open_launch(named: str, *, logs: Path | None = None) -> tuple[Run, int | None]:
    """The run and the launch of `NAME@3`, or of a directory with `@3`; no launch where none is named."""
    base, at, number = named.rpartition("@")
    if not at or not number.isdigit():
        return open(named, logs=logs), None
    run = open(base, logs=logs)
    return run, run.launch(int(number))


def list_runs(logs: Path) -> list[RunPaths]:
    """The runs of a directory by name; empty where there is none. Raises `ChronicleError` for one that cannot be listed."""
    try:
        names = sorted(one.name for one in os.scandir(logs) if not one.name.startswith(".") and one.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as problem:
        raise ChronicleError(
            f"cannot list `{logs}`: {problem.strerror}", "name the directory of all runs with --logs DIR"
        ) from problem
    return [paths for name in names if (paths := RunPaths(logs / name)).journal_dir.is_dir()]


def summarize_run(paths: RunPaths, story: Story | None = None) -> dict[str, Any]:
    """One row of `chronicle runs`. `values`: the newest of each channel; `status` is the last launch's state in one word."""
    story = read_story(paths) if story is None else story
    last, head = story.last_launch, story.headline
    tags = dict.fromkeys(tag for entry in story.entries for tag in words_of(entry).tags)
    place = read_place(paths)
    parent = _parent_of(story, place)
    kept_away = [note.archived for _, note in events_of(story.entries, Note) if note.archived is not None]
    tags = dict.fromkeys(tag for tag in tags if tag not in _taken_off(story.entries))
    return {
        "name": paths.run,
        "run_id": None if place is None else place.run_id,
        "status": "no launch" if last is None else _status(last),
        "step": head.step if head.launch is not None or head.step else None,
        "loss": head.loss,
        "lr": head.lr,
        "launches": len(story.launches),
        "abandoned": sum(launch.span.abandoned_steps for launch in story.launches),
        "rollbacks": sum(entry.kind == EntryKind.ROLLBACK_RECEIPT for entry in story.entries),
        "incidents": len(story.open_matters),
        "started": story.launches[0].started if story.launches and story.is_dated else None,
        "ended": last.ended or None if last is not None and not last.alive and story.is_dated else None,
        "parent": None if parent is None else parent.run,
        "parent_id": None if parent is None else parent.run_id or None,
        "parent_step": None if parent is None else parent.step,
        "archived": bool(kept_away) and kept_away[-1],
        "tags": list(tags),
        "values": dict(head.values),
        "settings": {} if last is None else settings_of(story.entries, last.number),
    }


def _parent_of(story: Story, place: Place | None) -> Parent | None:
    return story.parent if story.parent is not None or place is None else place.parent


def _taken_off(entries: Iterable[Entry]) -> set[str]:
    """The tags that were taken off a run and not given again."""
    gone: set[str] = set()
    for entry in entries:
        gone -= set(words_of(entry).tags)
        if entry.kind == EntryKind.NOTE:
            gone |= set(Note.of(entry).untags)
    return gone


def mark_runs(
    runs: Sequence[RunPaths],
    *,
    tags: Sequence[str],
    untags: Sequence[str],
    archived: bool | None,
    why: str,
    undoes: str | None = None,
) -> None:
    """Write into each run's journal that it has other tags, or is kept out of lists or shown again. Nothing is moved.

    `undoes`: the id of the note that this one takes back.
    """
    words = [*(f"tag {tag}" for tag in tags), *(f"tag {tag} taken off" for tag in untags)]
    words += [] if archived is None else ["archived" if archived else "taken out of the archive"]
    data: dict[str, Any] = {"tags": list(tags)} if tags else {}
    data |= {"untags": list(untags)} if untags else {}
    data |= {} if archived is None else {"archived": archived}
    data |= {"text": why} if why else {}
    for paths in runs:
        with JournalWriter(paths) as writer:
            writer.write(Note.from_json(data), title=", ".join(words), refs=() if undoes is None else (undoes,))


def _status(last: LaunchStory) -> str:
    if last.alive:
        return "running"
    if last.cause:
        return last.cause
    if last.exit_code is None:
        return "imported" if last.imported else "no end recorded"
    return "ended" if last.exit_code == 0 else "failed"


def rows_of(logs: Path) -> Iterator[Mapping[str, Any]]:
    """One row for each run of the directory; a run that cannot be read is a row whose status says so."""
    for paths in list_runs(logs):
        try:
            yield summarize_run(paths)
        except (ChronicleError, OSError, ValueError) as problem:
            yield {
                "name": paths.run,
                "status": "unreadable",
                "problem": str(problem),
                "tags": [],
                "values": {},
                "settings": {},
            }
