"""Import a source into a run: recognise its format, read it, write entries and per-step logs.

The digest of the source is part of the first entry, so importing twice changes nothing.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.integrations.foreign_journals import (
    Import,
    ImportedLaunch,
    cut_into_launches,
    is_event_table,
    read_entries,
    read_events,
)
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import ImportedSource, LaunchEnd, LaunchSettings, LaunchStart, events_of
from chronicle.metrics import Point
from chronicle.metrics.numbers import json_number
from chronicle.metrics.readers import read_log
from chronicle.paths import RunPaths
from rollback.disk.durable import write_atomic


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What was written. `entry_id` is None when this source was imported before; `has_changed`: it held other points then."""

    entry_id: str | None
    entries: int = 0
    launches: int = 0
    points: int = 0
    has_changed: bool = False


def write_import(paths: RunPaths, found: Import, source: Path | str, identity: str = "") -> Imported:
    """Append entries and launches. `source` is a path, or the name of something that is no file. Launch numbers continue.

    `identity` is the run's id in a store of runs. Such a run is known by its id and its points, whatever else the store holds;
    where it was imported before and has other points now, nothing is written: they would be launches that never were.
    """
    journal = read_journal(paths)
    name = source.name if isinstance(source, Path) else source
    if identity:
        name, digest = f"{name}#{identity}", _digest_of_points(found)
        earlier_ids = {earlier.path for _, earlier in events_of(journal.entries, ImportedSource)}
    else:
        digest = _digest(source) if isinstance(source, Path) else hashlib.sha256(source.encode()).hexdigest()
        earlier_ids = set()
    if any(earlier.sha256 == digest for _, earlier in events_of(journal.entries, ImportedSource)):
        return Imported(entry_id=None)
    if name in earlier_ids:
        return Imported(entry_id=None, has_changed=True)
    offset = max((e.launch for e in journal.entries if e.launch is not None), default=0)
    clock = _Clock(min((d.moment for d in found.drafts if d.moment is not None), default=_first_time(found.launches)))
    with JournalWriter(paths, clock=clock, host="import") as writer:
        points = sum(len(launch.points) for launch in found.launches)
        event = ImportedSource(path=name, sha256=digest, format=found.format, points=points)
        first = writer.write(event, title=f"imported {name} ({found.format})")
        for draft in found.drafts:
            clock.move_to(draft.moment)
            launch = None if draft.launch is None else draft.launch + offset
            writer.append(draft.kind, step=draft.step, launch=launch, title=draft.title, data=draft.data)
        begun = offset + max((d.launch for d in found.drafts if d.launch is not None), default=0)
        for number, launch_found in enumerate(found.launches, start=begun + 1):
            _write_launch(paths, writer, clock, number, launch_found)
    return Imported(entry_id=first.id, entries=len(found.drafts), launches=len(found.launches), points=points)


class _Clock:
    """Clock of an import: the source's own dates, or the last known one where it gives none."""

    def __init__(self, moment: datetime | None) -> None:
        self.moment = moment or datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.moment

    def move_to(self, moment: datetime | None) -> None:
        if moment is not None:
            self.moment = moment


def _first_time(launches: Iterable[ImportedLaunch]) -> datetime | None:
    times = [p.time for launch in launches for p in launch.points[:1] if p.time is not None]
    return _moment(times[0]) if times else None


def _moment(seconds: float) -> datetime | None:
    try:
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    except OverflowError:
        return None


def _write_launch(paths: RunPaths, writer: JournalWriter, clock: _Clock, number: int, launch: ImportedLaunch) -> None:
    first, last = launch.points[0], launch.points[-1]
    if first.time is not None:
        clock.move_to(_moment(first.time))
    start = max(first.step - 1, -1)  # -1: its first step was 0
    name = f" ({launch.name})" if launch.name else ""
    writer.write(LaunchStart(imported=True, start_step=start), launch=number, title=f"launch {number}{name}")
    if launch.settings:
        said = LaunchSettings(values=launch.settings, source=launch.settings_source)
        writer.write(said, launch=number, title=f"settings of {said.source}: {', '.join(launch.settings)}"[:200])
    _write_points(paths.metrics_path(number), launch.points)
    for draft in launch.drafts:
        clock.move_to(draft.moment)
        writer.append(draft.kind, step=draft.step, launch=number, title=draft.title, data=draft.data)
    if last.time is not None:
        clock.move_to(_moment(last.time))
    last_step = max(p.step for p in launch.points)
    end = LaunchEnd(imported=True, last_step=last_step, exit_code=launch.exit_code)
    writer.write(end, launch=number, step=last_step)


def _write_points(path: Path, points: Iterable[Point]) -> None:
    """Write a per-step log. Unlike the metrics writer, a point without a time stays without one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_atomic(path, "".join(_lines(points)), may_replace=False)
    except FileExistsError as problem:
        raise ChronicleError(f"per-step log `{path}` exists already: expected none; it was not changed") from problem


def _lines(points: Iterable[Point]) -> Iterator[str]:
    for point in points:
        record: dict[str, Any] = {"step": point.step}
        if point.time is not None:
            record["t"] = point.time
        record |= {name: json_number(value) for name, value in point.values.items()}
        yield json.dumps(record, separators=(",", ":")) + "\n"


def _digest_of_points(found: Import) -> str:
    digest = hashlib.sha256()
    for launch in found.launches:
        digest.update(b"launch\n")
        for line in _lines(launch.points):
            digest.update(line.encode())
    return digest.hexdigest()


def _digest(source: Path) -> str:
    digest = hashlib.sha256()
    files = sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]
    for path in files:
        digest.update(path.relative_to(source.parent).as_posix().encode("utf-8", "surrogateescape"))
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


# --- Recognising the format of a source


def _read_points(path: Path) -> Import:
    return Import(format="log", launches=cut_into_launches(read_log(path), path.name))


FORMATS: Mapping[str, Callable[[Path], Import]] = {"entries": read_entries, "events": read_events, "log": _read_points}


def read_source(path: Path, format_name: str | None = None) -> Import:
    """Read a file or directory. Raises `ChronicleError` when it is missing, empty, or of an unknown format."""
    if not Path(str(path).partition("#")[0]).exists():  # `mlflow.db#RUN` names one run of a store
        raise ChronicleError(f"cannot import `{path}`: no such file or directory")
    name = format_name or _recognise(path)
    if name not in FORMATS:
        raise ChronicleError(f"unknown format `{name}`: expected one of {', '.join(FORMATS)}")
    try:
        found = FORMATS[name](path)
    except UnicodeDecodeError as problem:
        raise ChronicleError(f"`{path}` is not UTF-8 text: {problem.reason} at byte {problem.start}") from problem
    if not found.drafts and not any(launch.points for launch in found.launches):
        hint = f"name its format with --as {'|'.join(FORMATS)}"
        raise ChronicleError(f"nothing to import in `{path}` (read as {name})", hint)
    return found


def _recognise(path: Path) -> str:
    """A journal of another kind by its first line; anything else is a log, whose form its reader finds."""
    if not path.is_file():
        return "log"
    with path.open("rb") as file:
        first = file.readline(1 << 16).decode("utf-8", "replace").strip()
    if is_event_table(first):
        return "events"
    try:
        record = json.loads(first)
    except ValueError:
        return "log"
    return "entries" if isinstance(record, dict) and "kind" in record and "title" in record else "log"
