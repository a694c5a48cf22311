"""MLflow's stores read as files: `mlruns/<experiment>/<run>/metrics/*` and the SQLite database, without MLflow.

Formats: one line `milliseconds value step` per measurement in the file store (mlflow/store/tracking/file_store.py), table
`metrics` in the database. A store with several runs needs the run's id: `mlflow.db#RUN`. Runs nested under a run are its
launches. A store behind a server is asked by `chronicle.integrations.mlflow`.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from chronicle.errors import UsageProblem
from chronicle.metrics.log import Point, join_steps, number_rows, points_of_launches

SQLITE_HEAD = b"SQLite format 3\0"
LOCK_SECONDS = 5.0  # how long a writer of the database is waited for
Measurement = tuple[int, float, str, float]  # step, seconds, name, value
NO_STORE = ("not an MLflow store", "chronicle watch --once mlflow.db#RUN")
NESTED = "SELECT run_uuid, value FROM tags WHERE key = 'mlflow.parentRunId'"


class WhichRun(UsageProblem):
    """A store holds several runs and the path names none of them."""


@contextmanager
def open_store(path: Path, what: str, way_out: str) -> Iterator[sqlite3.Connection]:
    """A SQLite database, read-only. Raises UsageProblem where it is not `what`, BlockingIOError while its writer holds it."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=LOCK_SECONDS)) as store:
            yield store
    except sqlite3.DatabaseError as problem:
        if "locked" in str(problem):
            raise BlockingIOError(errno.EAGAIN, "locked by its writer", str(path)) from problem
        raise UsageProblem(f"`{path}` is {what}: {problem}", way_out) from problem


def split_store(path: Path) -> tuple[Path, str | None]:
    """`mlflow.db#RUN` as the store and its run; None for a path that is there as it stands, or names no run."""
    if path.exists():
        return path, None
    name, _, run = str(path).partition("#")
    return Path(name), run or None


def columns_of(store: sqlite3.Connection, table: str) -> set[str]:
    """The columns of a table; none where there is no such table."""
    return {row[1] for row in store.execute(f"PRAGMA table_info({table})")}


def columns_in(path: Path, table: str) -> set[str]:
    """The columns of a table of a SQLite file; none for any other file."""
    try:
        with path.open("rb") as file:
            if file.read(len(SQLITE_HEAD)) != SQLITE_HEAD:
                return set()
        with open_store(path, "no database", "") as store:
            return columns_of(store, table)
    except (OSError, UsageProblem):
        return set()


def is_file_store_run(path: Path) -> bool:
    """Whether a directory is a run of the file store."""
    return (path / "metrics").is_dir() and (path / "meta.yaml").is_file()


def read_file_store(path: Path) -> Iterator[Point]:
    """Yield the points of one run's directory."""
    measured: list[Measurement] = []
    root = path / "metrics"
    for file in sorted(p for p in root.rglob("*") if p.is_file()):
        name = file.relative_to(root).as_posix()
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            words = line.split()
            try:
                measured.append((int(words[2]), int(words[0]) / 1000.0, name, float(words[1])))
            except (IndexError, ValueError):
                continue
    yield from points_of(measured)


def read_database(path: Path, run: str | None) -> Iterator[Point]:
    """Yield the points of one run of a SQLite store; raises WhichRun when it holds several and none is named."""
    with open_store(path, *NO_STORE) as store:
        members = _members(path, store, run)
        launches = [list(points_of(_measured(store, member))) for member in members]
    yield from number_rows(points_of_launches(launches))


def list_mlflow_runs(path: Path) -> dict[str, str]:
    """The runs of a SQLite store that are under no other run, and hold metrics or have runs under them that do: id -> name."""
    query = "SELECT run_uuid, name FROM runs WHERE lifecycle_stage != 'deleted' ORDER BY start_time"
    with open_store(path, *NO_STORE) as store:
        outermost = {parent or one for one, parent in _measured_runs(store).items()}
        return {one: name or "" for one, name in store.execute(query) if one in outermost}


def _measured_runs(store: sqlite3.Connection) -> dict[str, str | None]:
    """The runs with metrics, each with the run that it is nested under."""
    parent = dict(store.execute(NESTED).fetchall()) if columns_of(store, "tags") else {}
    rows = store.execute("SELECT DISTINCT run_uuid FROM metrics ORDER BY run_uuid")
    return {row[0]: parent.get(row[0]) for row in rows}


def _measured(store: sqlite3.Connection, run: str) -> Iterator[Measurement]:
    rows = store.execute("SELECT step, timestamp, key, value, is_nan FROM metrics WHERE run_uuid = ?", (run,))
    for step, stamp, key, value, is_nan in rows:
        yield step, stamp / 1000.0, key, float("nan") if is_nan else float(value)


def _members(path: Path, store: sqlite3.Connection, run: str | None) -> list[str]:
    """Return the run that is meant and the runs nested under it, in the order of their start; only those with metrics."""
    measured = _measured_runs(store)
    if not measured:
        return []  # a run that has just begun
    started = {}
    if columns_of(store, "runs"):
        started = dict(store.execute("SELECT run_uuid, start_time FROM runs").fetchall())
    outermost = sorted({parent or name for name, parent in measured.items()})
    known = outermost if run is None else sorted({*outermost, *measured})
    hits = [name for name in known if run is None or name.startswith(run)]
    if len(hits) != 1:
        listed = ", ".join(outermost[:8])
        raise WhichRun(f"`{path}` holds {len(outermost)} runs with metrics: {listed}", f"name one: {path}#RUN")
    found = [name for name, parent in measured.items() if hits[0] in (name, parent)]
    return sorted(found, key=lambda name: (started.get(name) or 0, name))


def points_of(measured: Iterable[Measurement]) -> Iterator[Point]:
    """Yield one point per step in the order of measurement, so that a rewind stays a rewind."""
    in_time = sorted(measured, key=lambda item: (item[1], item[0]))
    points = (Point(0, step, seconds, {name: value}) for step, seconds, name, value in in_time)
    return number_rows(join_steps(points))
