"""Which importer a source needs, by what it is: names where a tool fixes them, else the first line."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from chronicle.errors import ChronicleError
from chronicle.integrations.chronicle_markdown import read_chronicle
from chronicle.integrations.entries_jsonl import read_entries
from chronicle.integrations.events_csv import EVENT_COLUMNS, read_events
from chronicle.integrations.foreign_journals import Import, cut_into_launches
from chronicle.metrics import Point
from chronicle.metrics.json_logs import read_trainer_state
from chronicle.metrics.mlflow_log import is_file_store_run
from chronicle.metrics.readers import read_log
from chronicle.metrics.tensorboard_log import is_event_file, read_event_files

__all__ = ["FORMATS", "read_source"]


def _launches(name: str, read: Callable[[Path], Iterator[Point]]) -> Callable[[Path], Import]:
    return lambda path: Import(format=name, launches=cut_into_launches(read(path), path.name))


FORMATS: Mapping[str, Callable[[Path], Import]] = {
    "entries": read_entries,
    "chronicle": read_chronicle,
    "events": read_events,
    "tensorboard": _launches("tensorboard", read_event_files),
    "trainer-state": _launches("trainer-state", read_trainer_state),
    "log": _launches("log", read_log),
}


def read_source(path: Path, format_name: str | None = None) -> Import:
    """Read a file or directory; raises `ChronicleError` when it is missing, empty of sense, or of no known kind."""
    if not Path(str(path).partition("#")[0]).exists():  # `mlflow.db#RUN` names a run of a store
        raise ChronicleError(f"cannot import `{path}`: no such file or directory")
    name = format_name or _recognise(path)
    if name not in FORMATS:
        raise ChronicleError(f"unknown format `{name}`: expected one of {', '.join(FORMATS)}")
    try:
        found = FORMATS[name](path)
    except UnicodeDecodeError as problem:
        raise ChronicleError(f"`{path}` is not UTF-8 text: {problem.reason} at byte {problem.start}") from problem
    if not found.drafts and not any(launch.points for launch in found.launches):
        raise ChronicleError(f"nothing found in `{path}` (read as {name})", f"say what it is with --as {'|'.join(FORMATS)}")
    return found


def _recognise(path: Path) -> str:
    if is_file_store_run(path) or not path.exists():
        return "log"
    if path.is_dir() or is_event_file(path):
        return "tensorboard"
    if path.name == "trainer_state.json":
        return "trainer-state"
    if path.suffix.lower() in (".md", ".markdown"):
        return "chronicle"
    with path.open("rb") as file:
        first = file.readline(1 << 16).decode("utf-8", "replace").strip()
    if {cell.strip().lower() for cell in first.split(",")} >= EVENT_COLUMNS:
        return "events"
    if first.startswith("{"):
        try:
            record = json.loads(first)
        except ValueError:
            return "log"
        return "entries" if isinstance(record, dict) and "kind" in record and "title" in record else "log"
    return "log"
