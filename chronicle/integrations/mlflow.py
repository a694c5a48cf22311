"""Copies the journal to an MLflow tracking store, and imports runs from one. The only module that imports mlflow.

Parent run = run, nested run = launch, tag `abandoned_after` on launches that were rolled back. An MLflow run is never
resumed across a rollback: MLflow's headline would stay with the abandoned launch, and a changed LR parameter raises.
MLflow is a projection: tags in the store record how many bytes of each log it has, so it can be rebuilt or be down.
"""

import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.integrations.foreign_journals import Import, ImportedLaunch, cut_into_launches
from chronicle.metrics import Point
from chronicle.metrics.log import parse_line
from chronicle.metrics.mlflow_log import points_of
from chronicle.paths import RunPaths
from chronicle.report.markdown import render_markdown
from chronicle.story import LaunchStory, Story, read_story
from chronicle.story.plain import plain

EXPERIMENT = "chronicle"
BATCH = 1000  # MLflow's limit of metrics per request
CHUNK_BYTES = 1 << 20
QUIET = {  # do not wait minutes for a server that is down
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
}


class Projection:
    """Sends one run to one MLflow store. `feed` is idempotent: tags in MLflow record how many bytes of each log it has."""

    def __init__(self, paths: RunPaths, uri: str) -> None:
        self.paths = paths
        self.uri = uri
        self._client: Any = None
        self._lock: Any = None
        self._experiment: str | None = None
        self._parent: str | None = None
        self._nested: dict[int, str] = {}
        self._done: dict[int, int] = {}  # launch -> bytes of its per-step log already in MLflow
        self._said: dict[str, dict[str, str]] = {}  # run id -> tags as last written

    def close(self) -> None:
        """Release the lock, so that another process can send this run."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def __del__(self) -> None:
        self.close()

    def feed(self) -> int:
        """Send new data; return the number of metric values sent. Raises `ChronicleError` when the store does not answer.

        One process per machine sends a run at a time: the process of the previous launch may still be in its last pass
        when the next launch begins, and data must not be sent twice.
        """
        self._wait_for_turn()
        try:
            return self._feed()
        except ChronicleError:
            raise
        except Exception as problem:
            raise ChronicleError(
                f"mlflow store `{_without_password(self.uri)}` does not accept data: {_first_line(problem)}",
                "training continues; send everything later with `chronicle mlflow sync`",
            ) from problem

    def _wait_for_turn(self) -> None:
        """Take the lock and keep it. On a filesystem without locks the store itself drops equal rows."""
        if self._lock is not None or not self.paths.run_dir.is_dir():
            return
        try:
            self._lock = (self.paths.run_dir / "mlflow.lock").open("a")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError:
            pass  # read-only, or a filesystem without locks

    def _feed(self) -> int:
        story = read_story(self.paths)
        if not story.entries:
            return 0
        self._connect(story)
        sent = 0
        for launch in story.launches:
            run_id = self._launch_run(launch)
            sent += self._metrics(launch.number, run_id)
            self._tag(run_id, launch_tags(launch))
            self._finish(run_id, launch)
        self._tag(self._need_parent(), run_tags(story))
        return sent

    def attach_pages(self) -> None:
        """Upload the rendered pages as artifacts of the parent run."""
        for path in (self.paths.chronicle_md, self.paths.report_html):
            if path.exists():
                self._client.log_artifact(self._need_parent(), str(path))

    def _connect(self, story: Story) -> None:
        if self._parent is not None:
            return
        client = self._client = _client(self.uri)
        experiment = client.get_experiment_by_name(EXPERIMENT)
        if experiment is None:
            self._experiment = client.create_experiment(EXPERIMENT, artifact_location=self._artifacts())
        else:
            self._experiment = experiment.experiment_id
        identity = story.entries[0].id  # runs are identified by their first entry, not by their name
        self._parent = self._find(f"tags.`chronicle.id` = '{identity}' and tags.`chronicle.role` = 'run'")
        if self._parent is None:
            tags = {"chronicle.id": identity, "chronicle.role": "run", "chronicle.run": story.run, "mlflow.runName": story.run}
            self._parent = str(client.create_run(self._experiment, tags=tags).info.run_id)
        query = f"tags.`mlflow.parentRunId` = '{self._parent}' and tags.`chronicle.role` = 'launch'"
        for found in self._pages(query):
            number = int(found.data.tags["chronicle.launch"])
            self._nested[number] = found.info.run_id
            self._done[number] = int(found.data.tags.get("chronicle.metrics_bytes", "0"))

    def _artifacts(self) -> str | None:
        """Return the artifact directory beside a local database; None for a server, which has its own."""
        local = self.uri.startswith("sqlite:")
        return (self.paths.run_dir.parent.absolute() / "mlflow-artifacts").as_uri() if local else None

    def _find(self, query: str) -> str | None:
        return next((str(found.info.run_id) for found in self._pages(query)), None)

    def _pages(self, query: str) -> Iterator[Any]:
        token = None
        while True:
            page = self._client.search_runs([self._experiment], query, max_results=1000, page_token=token)
            yield from page
            token = page.token
            if not token:
                return

    def _need_parent(self) -> str:
        if self._parent is None:
            raise ChronicleError(f"run `{self.paths.run}` has no entries: nothing to send to mlflow")
        return self._parent

    def _launch_run(self, launch: LaunchStory) -> str:
        if launch.number not in self._nested:
            name = f"launch {launch.number}"
            tags = {"mlflow.parentRunId": self._need_parent(), "mlflow.runName": name, "chronicle.role": "launch"}
            tags |= {"chronicle.launch": str(launch.number), "chronicle.run": self.paths.run}
            created = self._client.create_run(self._experiment, start_time=_milliseconds(launch.started), tags=tags)
            self._nested[launch.number] = str(created.info.run_id)
            for key, value in launch_params(launch).items():
                self._client.log_param(self._nested[launch.number], key, value)
        return self._nested[launch.number]

    def _metrics(self, number: int, run_id: str) -> int:
        from mlflow.entities import Metric, RunTag

        sent, path = 0, self.paths.metrics_path(number)
        for points, end in _new_points(path, self._done.get(number, 0)):
            metrics = [
                Metric(metric_key(name), float(value), round((point.time or time.time()) * 1000), point.step)
                for point in points
                for name, value in point.values.items()
            ]
            for start in range(0, len(metrics), BATCH):
                self._client.log_batch(run_id, metrics=metrics[start : start + BATCH])
            self._client.log_batch(run_id, tags=[RunTag("chronicle.metrics_bytes", str(end))])
            self._done[number] = end
            sent += len(metrics)
        return sent

    def _tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        known = self._said.setdefault(run_id, {})
        for key, value in tags.items():
            if known.get(key) != value:
                self._client.set_tag(run_id, key, value)
                known[key] = value

    def _finish(self, run_id: str, launch: LaunchStory) -> None:
        known = self._said.setdefault(run_id, {})
        if not launch.ended or known.get("ended") == launch.ended:
            return
        status = "KILLED" if launch.signal else "FINISHED" if launch.exit_code == 0 else "FAILED"
        self._client.set_terminated(run_id, status=status, end_time=_milliseconds(launch.ended))
        known["ended"] = launch.ended


def _client(uri: str) -> Any:
    os.environ.update({key: value for key, value in QUIET.items() if key not in os.environ})
    try:
        from mlflow.tracking import MlflowClient
    except ModuleNotFoundError as problem:
        raise ChronicleError("mlflow is not installed", "pip install 'chronicle-ml[mlflow]'") from problem
    import logging

    logging.getLogger("mlflow").setLevel(logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=uri)


def _new_points(path: Path, offset: int) -> Iterator[tuple[list[Point], int]]:
    """Yield the points of complete lines after `offset`, in chunks, each with the offset after its last line."""
    try:
        with path.open("rb") as file:
            while True:
                file.seek(offset)
                block = file.read(CHUNK_BYTES)
                end = block.rfind(b"\n") + 1
                if not end:
                    return
                offset += end
                points = (parse_line(line) for line in block[:end].splitlines())
                yield [point for point in points if point is not None], offset
    except FileNotFoundError:
        return


def _milliseconds(stamp: str) -> int | None:
    try:
        return round(datetime.fromisoformat(stamp).timestamp() * 1000)
    except ValueError:
        return None


def _first_line(problem: BaseException) -> str:
    line = _without_password(plain(str(problem).strip().split("\n")[0]))
    return line[:200] or type(problem).__name__


def _without_password(uri: str) -> str:
    return re.sub(r"(://[^:/@\s]+):[^@\s]*@", r"\1:…@", uri)


# --- Parameters, tags and the note (pure)

VALUE_CHARACTERS = 500  # parameters and tags: the smallest limit of known servers
NOTE_CHARACTERS = 5000


def launch_params(launch: LaunchStory) -> dict[str, str]:
    """Return facts of the launch's start. An MLflow parameter cannot be changed later."""
    params = {"launch": str(launch.number), "argv": " ".join(launch.argv), "host": launch.host, "git_commit": launch.git_commit}
    if launch.lr is not None:
        params["lr_factor"] = "unknown" if launch.lr.factor is None else f"{launch.lr.factor:g}"
    return {key: plain(value)[:VALUE_CHARACTERS] for key, value in params.items() if value}


def launch_tags(launch: LaunchStory) -> dict[str, str]:
    """Return where the launch started and where it was abandoned. An empty `abandoned_after` clears an earlier tag."""
    span = launch.span
    tags = {
        "chronicle.start_step": span.start_step,
        "chronicle.resumed_from": span.start_step if launch.resumed else None,
        "chronicle.parent_launch": span.parent,
        "chronicle.lr_factor": None if launch.lr is None or launch.lr.factor is None else f"{launch.lr.factor:g}",
        "chronicle.guard": launch.verdict,
        "abandoned_after": span.abandoned_after if span.abandoned_after is not None else "" if span.has_steps else None,
    }
    return {key: plain(value) for key, value in tags.items() if value is not None and (value != "" or key == "abandoned_after")}


def run_tags(story: Story) -> dict[str, str]:
    """Return the lineage's state as tags. The parent run has no curve, so no abandoned point can become its headline."""
    head = story.headline
    tags = {"lineage.step": str(head.step), "lineage.launch": str(head.launch or "")}
    tags |= {f"lineage.{metric_key(name)}": f"{value:.6g}" for name, value in head.values.items()}
    tags["lineage.lr_ledger"] = " -> ".join("?" if f is None else f"{f:g}" for f in story.lr_path)
    note = render_markdown(story, picture=False)
    tags["mlflow.note.content"] = note if len(note) <= NOTE_CHARACTERS else note[:NOTE_CHARACTERS] + "\n\n… (cut)"
    return {key: value for key, value in tags.items() if value}


def metric_key(name: str) -> str:
    """Replace characters that MLflow does not allow in metric names; cut to 250."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:250]


# --- Importing a run from a store


def read_mlflow(uri: str, run_id: str) -> Import:
    """Read all metrics of a run and of the runs nested under it, through the MLflow client.

    A run that was resumed holds both timelines in one history; the timestamps separate them. Raises `ChronicleError` when
    the store has no such run.
    """
    client = _client(uri)
    try:
        run = client.get_run(run_id)
        query = f"tags.`mlflow.parentRunId` = '{run_id}'"
        nested = client.search_runs([run.info.experiment_id], query, order_by=["attributes.start_time"])
    except Exception as problem:
        raise ChronicleError(f"cannot read mlflow run `{run_id}`: {_first_line(problem)}") from problem
    launches = [part for found in (run, *nested) for part in _launches(client, found)]
    return Import(format="mlflow", launches=tuple(launches))


def _launches(client: Any, run: Any) -> Iterator[ImportedLaunch]:
    history = (m for key in run.data.metrics for m in client.get_metric_history(run.info.run_id, key))
    points = points_of((m.step, m.timestamp / 1000, m.key, m.value) for m in history)
    yield from cut_into_launches(points, run.info.run_name or run.info.run_id)
