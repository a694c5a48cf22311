"""The projection through a real `mlflow server`, on SQLite and on PostgreSQL: what the server answers, not what we sent."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from chronicle.integrations.mlflow import Projection
from tests.builders.story_runs import toy_run

pytest.importorskip("mlflow")
POSTGRES = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)
WAIT_SECONDS = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def mlflow_server(directory: Path, store: str) -> Iterator[str]:
    """A server of its own on a free port; ended with its workers by its process group."""
    port = free_port()
    words = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    words += ["--backend-store-uri", store, "--artifacts-destination", str(directory / "artifacts")]
    with (directory / "server.log").open("w") as log:
        server = subprocess.Popen(words, cwd=directory, stdout=log, stderr=log, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + WAIT_SECONDS
        while not answers(url):
            assert server.poll() is None and time.monotonic() < deadline, (directory / "server.log").read_text()[-2000:]
            time.sleep(0.2)
        yield url
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def postgres(directory: Path) -> Iterator[str]:
    """A cluster of its own below `directory`, reached over TCP; started as an ordinary user, as it demands."""
    assert POSTGRES is not None
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    data, port = directory / "data", free_port()
    data.mkdir()
    if user:
        shutil.chown(data, 65534, 65534)
    init = [*user, str(POSTGRES / "initdb"), "-D", str(data), "-U", "mlflow", "-A", "trust", "--no-sync"]
    subprocess.run(init, check=True, capture_output=True, cwd="/")
    words = [*user, str(POSTGRES / "postgres"), "-D", str(data), "-p", str(port), "-h", "127.0.0.1", "-k", str(data), "-F"]
    with (directory / "postgres.log").open("w") as log:
        server = subprocess.Popen(words, cwd="/", stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        ask = [str(POSTGRES / "pg_isready"), "-h", "127.0.0.1", "-p", str(port), "-q"]
        while subprocess.run(ask, check=False).returncode:
            assert server.poll() is None and time.monotonic() < deadline, (directory / "postgres.log").read_text()[-2000:]
            time.sleep(0.1)
        yield f"postgresql+psycopg2://mlflow@127.0.0.1:{port}/postgres"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)


def check_projection(directory: Path, url: str) -> None:
    """The toy run, sent twice, then rolled back once more: one parent, two launches, honest values."""
    from mlflow.tracking import MlflowClient

    story = toy_run(directory / "run")
    first = Projection(story.paths, url)
    assert first.feed() == 26
    first.close()
    again = Projection(story.paths, url)
    assert again.feed() == 0
    client = MlflowClient(tracking_uri=url)
    experiment = client.get_experiment_by_name("chronicle")
    runs = {r.info.run_name: r for r in client.search_runs([experiment.experiment_id])}
    assert sorted(runs) == ["launch 1", "launch 2", "toy"]
    assert runs["launch 2"].data.metrics["loss"] == 8.2
    assert runs["toy"].data.metrics == {} and runs["toy"].data.tags["lineage.loss"] == "8.2"
    assert runs["launch 1"].data.tags["abandoned_after"] == "5"
    assert [m.step for m in client.get_metric_history(runs["launch 1"].info.run_id, "loss")] == list(range(1, 11))
    story.paths.chronicle_md.write_text("# page")
    again.attach_pages()
    assert [f.path for f in client.list_artifacts(runs["toy"].info.run_id)] == ["CHRONICLE.md"]
    again.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_server_on_sqlite_tells_the_lineage(tmp_path: Path) -> None:
    with mlflow_server(tmp_path, f"sqlite:///{tmp_path}/server.db") as url:
        check_projection(tmp_path, url)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(POSTGRES is None, reason="PostgreSQL is not installed here")
@pytest.mark.skipif(find_spec("psycopg2") is None, reason="psycopg2 is not installed here")
def test_a_server_on_postgresql_tells_the_lineage(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("pg")
    for parent in (directory, *directory.parents):
        if parent == Path(tempfile.gettempdir()) or parent == parent.parent:
            break
        parent.chmod(parent.stat().st_mode | 0o011)  # the database's user must get to its own directory
    with postgres(directory) as store, mlflow_server(directory, store) as url:
        check_projection(directory, url)
