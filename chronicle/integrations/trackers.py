"""Stores of other trackers as runs: one source may hold many, and each becomes a run of its own.

W&B's offline directories, trackio's databases, MLflow's stores, directories of TensorBoard, and tables that hold several
runs (a panel's export, a table with a run column). A run is known by the id that its tracker gave it, or by the name where
there is no id. Sessions of one id are launches of one run, in the order of their start. TensorBoard gives no id: directories
that were written at the same time are separate runs; those written one after the other may be launches of one run, or not,
and that is said (`Tracked.doubt`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from chronicle.errors import UsageProblem
from chronicle.integrations.foreign_journals import Draft, Import, ImportedLaunch, cut_into_launches, is_event_table
from chronicle.journal.events import Incident, Note
from chronicle.metrics.log import Point
from chronicle.metrics.mlflow_log import (
    columns_in,
    is_file_store_run,
    list_mlflow_runs,
    read_database,
    read_file_store,
    split_store,
)
from chronicle.metrics.run_tables import read_runs_of_table
from chronicle.metrics.tensorboard_log import is_event_file, read_event_files
from chronicle.metrics.trackio_log import TrackioRun, is_trackio_database, read_project
from chronicle.metrics.wandb_log import WandbSession, read_sessions, wandb_files
from chronicle.story.launch_settings import plain_settings

TIERS = {"info": "notice", "warn": "warn", "error": "warn"}  # an alert's level there -> tier
MLFLOW_META = "meta.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """One run of a store. `identity` is its id there; `left_out` and `doubt` say what a person should know of the reading.

    `is_named`: its tracker gave it an id and a name of its own; else both are made of files, directories or columns.
    """

    identity: str
    name: str
    found: Import
    is_named: bool = False
    left_out: str = ""
    doubt: str = ""


def read_tracked(path: Path, tracker: str | None = None) -> list[Tracked] | None:
    """The runs of a store, those with points, in its order; None where the path is no store of a known tracker.

    `tracker` names one of TRACKERS and is not asked whether it recognises the path. `store#RUN` is one run of it, by its name
    or the beginning of its id. Raises UsageProblem where the store holds no run with a number, or not the one that is named.
    """
    store, chosen = split_store(path)
    for key, (recognises, read) in TRACKERS.items():
        if key == tracker or (tracker is None and recognises(store)):
            runs = [one for one in read(store) if any(launch.points for launch in one.found.launches)]
            if chosen is None and runs:
                return runs
            named = [one for one in runs if one.name == chosen] or [
                one for one in runs if one.identity.startswith(chosen or "?")
            ]
            if named or (key == "mlflow" and runs):  # a run that is nested under another is read by `mlflow_log`
                return named or None
            known = ", ".join(one.name for one in runs[:8])
            missing = (
                f"no run `{chosen}`: its runs are {known}" if runs else f"no run with a logged number (read as {key})"
            )
            raise UsageProblem(
                f"`{store}` holds {missing}", f"name one: {store}#RUN" if runs else "name another source"
            )
    return None


# --- W&B


def _wandb(path: Path) -> Iterator[Tracked]:
    by_run: dict[tuple[str, str], list[WandbSession]] = {}
    for session in read_sessions(path):
        key = (session.project, session.run_id or session.path.stem)
        by_run.setdefault(key, []).append(session)
    for (_, identity), sessions in by_run.items():
        launches = [launch for session in sessions for launch in _wandb_launches(session)]
        samples = sum(session.system_samples for session in sessions)
        yield Tracked(
            identity=identity,
            name=sessions[-1].name or identity,
            is_named=bool(sessions[-1].run_id),
            found=Import(format="wandb", launches=tuple(launches)),
            left_out=f"{samples} samples of the system" if samples else "",
            doubt=""
            if all(one.is_whole for one in sessions)
            else "a session has no end: it was stopped, or still writes",
        )


def _wandb_launches(session: WandbSession) -> list[ImportedLaunch]:
    launches = list(cut_into_launches(session.points, session.name or session.run_id))
    drafts = [_alert("W&B", title, text, level, None, session.started) for title, text, level in session.alerts]
    if session.branched_from is not None:
        parent, step = session.branched_from
        drafts.append(
            _draft(Note(text="", tags=("import",)), f"continues W&B run {parent} from its step {step}", session.started)
        )
    return _with_settings(launches, "W&B", session.config, drafts, exit_code=session.exit_code)


# --- trackio


def _trackio(path: Path) -> Iterator[Tracked]:
    files = [path] if path.is_file() else sorted(one for one in path.glob("*.db") if is_trackio_database(one))
    for file in files:
        for run in read_project(file):
            yield _trackio_run(run)


def _trackio_run(run: TrackioRun) -> Tracked:
    launches = list(cut_into_launches(run.points, run.name))
    drafts = [_alert("trackio", *alert) for alert in run.alerts]
    whole = _with_settings(launches, "trackio", run.config, drafts)
    found = Import(format="trackio", launches=tuple(whole))
    return Tracked(identity=run.run_id, name=run.name, found=found, is_named=run.run_id != run.name)


def _is_trackio(path: Path) -> bool:
    return is_trackio_database(path) or (path.is_dir() and any(is_trackio_database(one) for one in path.glob("*.db")))


# --- MLflow, without a server


def _mlflow(path: Path) -> Iterator[Tracked]:
    if path.is_file():
        for identity, name in list_mlflow_runs(path).items():
            yield _plain(identity, name or identity, "mlflow", read_database(path, identity), is_named=True)
        return
    for directory in [path] if is_file_store_run(path) else _file_runs(path):
        name = _meta(directory, "run_name") or directory.name
        yield _plain(directory.name, name, "mlflow", read_file_store(directory), is_named=True)


def _is_mlflow(path: Path) -> bool:
    if path.is_dir():
        return is_file_store_run(path) or any(True for _ in _file_runs(path))
    return bool(columns_in(path, "metrics"))


def _file_runs(path: Path) -> Iterator[Path]:
    """The runs below an `mlruns` or an experiment of it, without what was deleted there."""
    for pattern in (f"*/{MLFLOW_META}", f"*/*/{MLFLOW_META}"):
        for meta in sorted(path.glob(pattern)):
            if is_file_store_run(meta.parent) and _meta(meta.parent, "lifecycle_stage") != "deleted":
                yield meta.parent


def _meta(directory: Path, key: str) -> str:
    lines = (directory / MLFLOW_META).read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition(":")[2].strip().strip("'\"") for line in lines if line.startswith(f"{key}:")), "")


# --- TensorBoard


def _tensorboard(path: Path) -> Iterator[Tracked]:
    if path.is_file():
        yield _events_in(path, path.name)
        return
    places = sorted({file.parent for file in path.rglob("*tfevents*") if file.is_file()})
    outermost = [one for one in places if not any(other in one.parents for other in places)]
    spans = {one: span for one in outermost if (span := _span(read_event_files(one))) is not None}
    if len(spans) > 1 and _overlap(spans.values()):
        for place in spans:
            yield _events_in(place, place.relative_to(path).as_posix())
        return
    doubt = (
        f"{len(spans)} directories, one written after the other, are taken for launches of one run: "
        "import each alone, with --run, where they are runs"
    )
    whole = _events_in(path, path.name)
    yield replace(whole, doubt=doubt) if len(spans) > 1 else whole


def _span(points: Iterable[Point]) -> tuple[float, float] | None:
    times = [point.time for point in points if point.time is not None]
    return (min(times), max(times)) if times else None


def _overlap(spans: Iterable[tuple[float, float]]) -> bool:
    """Whether any two were written at the same time: launches of one run never are."""
    ordered = sorted(spans)
    return any(later[0] < earlier[1] for earlier, later in pairwise(ordered))


def _is_tensorboard(path: Path) -> bool:
    return is_event_file(path) if path.is_file() else any(one.is_file() for one in path.rglob("*tfevents*"))


# --- tables of several runs


def _table(path: Path) -> Iterator[Tracked]:
    for name, points in (read_runs_of_table(path) or {}).items():
        yield _plain(name, name, "table", points)


def _is_table(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:  # a table of incidents may have a column of runs, too
        first = file.readline(1 << 16).decode("utf-8", "replace").strip()
    return not is_event_table(first) and read_runs_of_table(path) is not None


# --- what they share


def _plain(identity: str, name: str, tracker: str, points: Iterable[Point], *, is_named: bool = False) -> Tracked:
    found = Import(format=tracker, launches=cut_into_launches(points, name))
    return Tracked(identity=identity, name=name, found=found, is_named=is_named)


def _events_in(path: Path, name: str) -> Tracked:
    left_out: list[str] = []
    tracked = _plain(name, name, "tensorboard", read_event_files(path, left_out))
    return replace(tracked, left_out="; ".join(left_out))


def _with_settings(
    launches: Sequence[ImportedLaunch], source: str, config: Mapping[str, Any], drafts: Sequence[Draft], **more: Any
) -> list[ImportedLaunch]:
    """Each launch with the settings of its session; alerts and the exit code belong to the last one."""
    whole = [replace(launch, settings=plain_settings(config), settings_source=source) for launch in launches]
    if whole:
        whole[-1] = replace(whole[-1], drafts=tuple(drafts), **more)
    return whole


def _alert(source: str, title: str, text: str, level: str, step: int | None, seconds: float | None) -> Draft:
    tier = TIERS.get(level.lower(), "warn")
    event = Incident(text=text, kind="alert", tier=tier, status="closed", onset_step=step, tags=("alert",))
    return _draft(event, f"{title} ({source})", seconds, step)


def _draft(event: Incident | Note, title: str, seconds: float | None, step: int | None = None) -> Draft:
    moment = None if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return Draft(kind=event.KIND, title=title, moment=moment, step=step, data=event.to_json())


Reader = Callable[[Path], Iterator[Tracked]]
TRACKERS: Mapping[str, tuple[Callable[[Path], bool], Reader]] = {
    "wandb": (lambda path: bool(wandb_files(path)), _wandb),
    "trackio": (_is_trackio, _trackio),
    "mlflow": (_is_mlflow, _mlflow),
    "tensorboard": (_is_tensorboard, _tensorboard),
    "table": (_is_table, _table),
}
