"""trackio's database of a project, `<project>.db` (SQLite), without trackio.

Tables (trackio/sqlite_storage.py, 0.43): `metrics` with one row a log call (`run_id`, `run_name`, `step`, `timestamp` in ISO,
`metrics` as JSON), `configs`, `alerts`. Databases of before 0.24 have no `run_id`: there the name is the identity. Rows are
read in trackio's order, by time and row. A project holds several runs; `project.db#RUN` names one by its name or id.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from chronicle.errors import UsageProblem
from chronicle.metrics.log import Point
from chronicle.metrics.mlflow_log import columns_in, columns_of, open_store
from chronicle.metrics.records import json_object, points_of_records

_opened = partial(open_store, what="no project of trackio", way_out="name a <project>.db")
OWN_FIELDS = ("_Username", "_Created", "_Group")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackioRun:
    """One run of a project: settings, points in the order of logging, and alerts as (title, text, level, step, seconds)."""

    run_id: str
    name: str
    config: Mapping[str, Any]
    points: tuple[Point, ...]
    alerts: tuple[tuple[str, str, str, int | None, float | None], ...]


def is_trackio_database(path: Path) -> bool:
    """Whether a file is a project of trackio: SQLite with its table of metrics."""
    return {"run_name", "step", "metrics", "timestamp"} <= columns_in(path, "metrics")


def read_project(path: Path, wanted: str | None = None) -> list[TrackioRun]:
    """The runs of a project in the order of their first row, one of them by name or id. Raises UsageProblem, OSError."""
    with _opened(path) as store:
        names = _runs(store)
        hits = {one: name for one, name in names.items() if wanted in (None, one, name)}
        if wanted is not None and not hits:
            known = ", ".join(names.values()) or "none"
            raise UsageProblem(f"`{path}` holds no run `{wanted}`: its runs are {known}", f"name one: {path}#RUN")
        return [_read_run(store, one, name) for one, name in hits.items()]


def read_trackio(path: Path, wanted: str | None = None) -> Iterator[Point]:
    """Yield the points of one run; raises UsageProblem where the project holds several and none is named."""
    runs = [run for run in read_project(path, wanted) if run.points]
    if len(runs) > 1:
        some = ", ".join(run.name for run in runs[:8])
        raise UsageProblem(f"`{path}` holds {len(runs)} runs: {some}", f"name one: {path}#RUN")
    for run in runs:
        yield from run.points


def _key(store: sqlite3.Connection, table: str) -> str:
    """The column that says which run a row belongs to."""
    return "run_id" if "run_id" in columns_of(store, table) else "run_name"


def _runs(store: sqlite3.Connection) -> dict[str, str]:
    rows = store.execute(f"SELECT {_key(store, 'metrics')}, run_name FROM metrics ORDER BY id")
    found: dict[str, str] = {}
    for one, name in rows:
        found.setdefault(str(one), str(name))
    return found


def _read_run(store: sqlite3.Connection, one: str, name: str) -> TrackioRun:
    query = f"SELECT timestamp, step, metrics FROM metrics WHERE {_key(store, 'metrics')} = ? ORDER BY timestamp, id"
    records = []
    for stamp, step, text in store.execute(query, (one,)):
        records.append({**(json_object(str(text)) or {}), "_step": step, "_timestamp": _seconds(stamp)})
    config = _config(store, one)
    return TrackioRun(
        run_id=one,
        name=name,
        config={key: value for key, value in config.items() if key not in OWN_FIELDS},
        points=tuple(points_of_records(records)),
        alerts=tuple(_alerts(store, one)),
    )


def _config(store: sqlite3.Connection, one: str) -> Mapping[str, Any]:
    if not columns_of(store, "configs"):
        return {}
    row = store.execute(f"SELECT config FROM configs WHERE {_key(store, 'configs')} = ?", (one,)).fetchone()
    return {} if row is None else json_object(str(row[0])) or {}


def _alerts(store: sqlite3.Connection, one: str) -> Iterator[tuple[str, str, str, int | None, float | None]]:
    if columns_of(store, "alerts"):
        query = f"SELECT title, text, level, step, timestamp FROM alerts WHERE {_key(store, 'alerts')} = ? ORDER BY id"
        for title, text, level, step, stamp in store.execute(query, (one,)):
            yield str(title), str(text or ""), str(level), step, _seconds(stamp)


def _seconds(stamp: Any) -> float | None:
    try:
        moment = datetime.fromisoformat(str(stamp))
    except ValueError:
        return None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
