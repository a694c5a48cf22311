"""The journal projected into MLflow: parent run = run, nested run = launch, `abandoned_after` on what was given up.

The only importer of mlflow. Never resumes an MLflow run across a rollback, because MLflow's headline would stay with the
abandoned launch (`loss = 100.0`) and a changed LR parameter raises (journal_and_interface §1.1). MLflow is a projection:
how far it has come stands in its own tags, so it can be rebuilt, fed again, or be down.

    start_mirror   (`chronicle run`)  starts `python -m chronicle.mlflow_mirror`; imports nothing
    main           (that process)     feeds every two seconds until its stdin ends
    Projection     one pass: what is new in journal and per-step logs goes out in batches
"""

import argparse
import fcntl
import importlib.util
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.metrics import Point
from chronicle.metrics.log import parse_line
from chronicle.paths import RunPaths
from chronicle.report.markdown import render_markdown
from chronicle.story import LaunchStory, Story, read_story
from chronicle.story.plain import plain

__all__ = ["MirrorHandle", "Projection", "default_uri", "main", "start_mirror"]

EXPERIMENT = "chronicle"
LAST_PASS_SECONDS = 300
BATCH = 1000  # MLflow's own limit of metrics a request
VALUE_CHARACTERS = 500  # parameters and tags: the smallest limit of the servers in use
NOTE_CHARACTERS = 5000
CHUNK_BYTES = 1 << 20
INTERVAL_SECONDS = 2.0
PATIENCE_SECONDS = 60.0
QUIET = {  # a server that is down must not hold anybody for minutes
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
}


def default_uri(paths: RunPaths) -> str:
    """`sqlite:///…/logs/mlflow.db`, beside the runs."""
    return f"sqlite:///{(paths.run_dir.parent / 'mlflow.db').absolute()}"


@dataclass(slots=True)
class MirrorHandle:
    """The feeding process, if there is one; `stop` lets it finish its last batch."""

    pid: int | None = None
    stdin_fd: int | None = None  # its end is the sign to finish

    def stop(self, timeout_seconds: float = 3.0) -> bool:
        """Ask it to end after a last pass; whether it did in time. Never raises.

        It is never killed: MLflow may be creating its tables, and half of them would make the store unusable. It ends
        by itself, at the latest LAST_PASS_SECONDS from now.
        """
        pid, stdin_fd, self.pid, self.stdin_fd = self.pid, self.stdin_fd, None, None
        if pid is None or stdin_fd is None:
            return True
        try:
            process = os.pidfd_open(pid)
        except OSError:
            os.close(stdin_fd)
            return True  # it is gone already
        os.close(stdin_fd)
        try:
            return bool(select.select([process], [], [], timeout_seconds)[0])
        finally:
            os.close(process)


def start_mirror(
    paths: RunPaths,
    uri: str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    talk: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> MirrorHandle:
    """Feed MLflow from another process while a launch runs. Never raises, never waits, says at most one line.

    The process is nobody's child here (forked twice), so that a supervisor which ends everything below it, or waits for
    it, leaves it alone; it ends by itself when our end of its stdin closes, that is also when we are killed.
    """
    if importlib.util.find_spec("mlflow") is None:
        talk("mlflow is not installed: nothing is mirrored (pip install 'chronicle[mlflow]')")
        return MirrorHandle()
    words = [sys.executable, "-m", "chronicle.mlflow_mirror", "--run-dir", str(paths.run_dir.absolute())]
    words += ["--uri", uri or default_uri(paths)]
    environment = {**(os.environ if environ is None else environ), **QUIET}
    told, tell = os.pipe()
    stdin, stdin_fd = os.pipe()

    def leave() -> None:
        pid = os.fork()
        if pid:
            os.write(tell, str(pid).encode())
            os._exit(0)
        os.nice(10)

    try:
        between = subprocess.Popen(
            words, stdin=stdin, stdout=subprocess.DEVNULL, env=environment, preexec_fn=leave, start_new_session=True
        )
        between.wait()
        pid = int(os.read(told, 32))
    except (OSError, ValueError, subprocess.SubprocessError) as problem:
        os.close(stdin_fd)
        talk(f"mlflow is not fed: {problem}; `chronicle mlflow sync` does it later")
        return MirrorHandle()
    finally:
        for fd in (told, tell, stdin):
            os.close(fd)
    return MirrorHandle(pid, stdin_fd)


class Projection:
    """One run in one MLflow store. `feed` is idempotent: tags in MLflow say how many bytes of each log it has."""

    def __init__(self, paths: RunPaths, uri: str) -> None:
        self.paths = paths
        self.uri = uri
        self._client: Any = None
        self._lock: Any = None
        self._experiment: str | None = None
        self._parent: str | None = None
        self._nested: dict[int, str] = {}
        self._done: dict[int, int] = {}  # launch -> bytes of its per-step log that MLflow has
        self._said: dict[str, dict[str, str]] = {}  # run id -> tags as last written

    def close(self) -> None:
        """Let the next process have its turn."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def __del__(self) -> None:
        self.close()

    def feed(self) -> int:
        """Send what is new; returns how many metric values went out. Raises `ChronicleError` when the store does not answer.

        One process at a time feeds a run from a machine: the mirror of the last launch may still be at its last pass
        when the next one begins, and what it has sent must be known before anything is sent again.
        """
        self._wait_for_turn()
        try:
            return self._feed()
        except ChronicleError:
            raise
        except Exception as problem:
            raise ChronicleError(
                f"mlflow store `{_without_password(self.uri)}` does not take data: {_first_line(problem)}",
                "training goes on; `chronicle mlflow sync` sends everything later",
            ) from problem

    def _wait_for_turn(self) -> None:
        """Held until this process ends; where the filesystem knows no locks, the store itself drops equal rows."""
        if self._lock is not None or not self.paths.run_dir.is_dir():
            return
        try:
            self._lock = (self.paths.run_dir / "mlflow.lock").open("a")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError:
            pass  # a read-only or strange filesystem

    def _feed(self) -> int:
        story = read_story(self.paths)
        if not story.entries:
            return 0
        self._connect(story)
        sent = 0
        for launch in story.launches:
            run_id = self._launch_run(launch)
            sent += self._metrics(launch.number, run_id)
            self._tag(run_id, _launch_tags(launch))
            self._finish(run_id, launch)
        self._tag(self._need_parent(), _run_tags(story))
        return sent

    def attach_pages(self) -> None:
        """The rendered pages as artifacts of the parent run."""
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
        identity = story.entries[0].id  # two runs of one name are two runs
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
        """Beside the database for a local store; a server decides for itself."""
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
            for key, value in _launch_params(launch).items():
                self._client.log_param(self._nested[launch.number], key, value[:VALUE_CHARACTERS])
        return self._nested[launch.number]

    def _metrics(self, number: int, run_id: str) -> int:
        from mlflow.entities import Metric, RunTag

        sent, path = 0, self.paths.metrics_path(number)
        for points, end in _new_points(path, self._done.get(number, 0)):
            metrics = [
                Metric(_key(name), float(value), round((point.time or time.time()) * 1000), point.step)
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
        raise ChronicleError("mlflow is not installed", "pip install 'chronicle[mlflow]'") from problem
    import logging

    logging.getLogger("mlflow").setLevel(logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=uri)


def _new_points(path: Path, offset: int) -> Iterator[tuple[list[Point], int]]:
    """Whole lines behind `offset`, in chunks, each with the offset behind its last line."""
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


def _launch_params(launch: LaunchStory) -> dict[str, str]:
    params = {"launch": str(launch.number), "argv": " ".join(launch.argv), "host": launch.host, "git_commit": launch.git_commit}
    if launch.lr is not None:
        params["lr_factor"] = "unknown" if launch.lr.factor is None else f"{launch.lr.factor:g}"
    return {key: plain(value) for key, value in params.items() if value}


def _launch_tags(launch: LaunchStory) -> dict[str, str]:
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


def _run_tags(story: Story) -> dict[str, str]:
    """What the lineage says: MLflow has no curve on the parent, so no abandoned point can become a headline."""
    head = story.headline
    tags = {"lineage.step": str(head.step), "lineage.launch": str(head.launch or "")}
    tags |= {f"lineage.{_key(name)}": f"{value:.6g}" for name, value in head.values.items()}
    tags["lineage.lr_ledger"] = " -> ".join("?" if f is None else f"{f:g}" for f in story.lr_path)
    note = render_markdown(story, picture=False)
    tags["mlflow.note.content"] = note if len(note) <= NOTE_CHARACTERS else note[:NOTE_CHARACTERS] + "\n\n… (cut)"
    return {key: value for key, value in tags.items() if value}


def _key(name: str) -> str:
    """MLflow's alphabet for names."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:250]


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


def main(arguments: list[str] | None = None) -> int:
    """Feed until stdin ends (the supervisor closed it, or is gone), then once more."""
    parser = argparse.ArgumentParser(prog="chronicle.mlflow_mirror")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--uri", required=True)
    options = parser.parse_args(arguments)
    over = threading.Event()
    threading.Thread(target=_wait_for_end, args=(over,), daemon=True).start()
    projection, wait, complained = Projection(RunPaths(options.run_dir), options.uri), INTERVAL_SECONDS, False
    while True:
        last = over.is_set()
        try:
            projection.feed()
            wait = INTERVAL_SECONDS
        except ChronicleError as problem:
            if not complained:
                print(f"chronicle: {problem.message}; {problem.remedy or ''}".rstrip("; "), file=sys.stderr)
                complained = True
            projection.close()
            projection = Projection(RunPaths(options.run_dir), options.uri)
            wait = min(2 * wait, PATIENCE_SECONDS)
        if last:
            return 0
        over.wait(wait)


def _wait_for_end(over: threading.Event) -> None:
    while sys.stdin.buffer.read(1 << 12):
        pass
    signal.alarm(LAST_PASS_SECONDS)
    over.set()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
