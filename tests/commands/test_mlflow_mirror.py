"""MLflow as a projection of the toy run, in a real SQLite store: what eight trackers get wrong, read back through MLflow."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from chronicle.errors import ChronicleError
from chronicle.integrations.mlflow import Projection
from chronicle.integrations.mlflow_process import default_uri, start_mlflow_process
from chronicle.launch.beside import Beside
from tests.builders.story_runs import StoryRun, toy_run
from tests.commands.cli import Cli

pytest.importorskip("mlflow")


def runs(story: StoryRun, role: str) -> list[Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=default_uri(story.paths))
    experiment = client.get_experiment_by_name("chronicle")
    query = f"tags.`chronicle.role` = '{role}'"
    return list(client.search_runs([experiment.experiment_id], query, order_by=["attributes.start_time"]))


def history(story: StoryRun, run_id: str, key: str) -> list[tuple[int, float]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=default_uri(story.paths))
    return [(m.step, m.value) for m in client.get_metric_history(run_id, key)]


@pytest.mark.filterwarnings("default")
def test_the_toy_run_is_one_parent_and_two_honest_curves_however_often_it_is_sent(tmp_path: Path) -> None:
    story = toy_run(tmp_path)
    assert Projection(story.paths, default_uri(story.paths)).feed() == 26
    assert Projection(story.paths, default_uri(story.paths)).feed() == 0
    (parent,) = runs(story, "run")
    first, second = runs(story, "launch")
    assert parent.data.metrics == {}
    assert parent.data.tags["lineage.loss"] == "8.2" and parent.data.tags["lineage.step"] == "8"
    assert "rollback to 5" in parent.data.tags["mlflow.note.content"]
    assert first.data.tags["abandoned_after"] == "5" and second.data.tags["abandoned_after"] == ""
    assert history(story, second.info.run_id, "loss") == [(6, 8.4), (7, 8.3), (8, 8.2)]
    assert len(history(story, first.info.run_id, "loss")) == 10
    assert (first.data.params["lr_factor"], second.data.params["lr_factor"]) == ("1", "0.5")
    assert (first.info.status, second.info.status) == ("KILLED", "FINISHED")
    # a later rollback adds a tag and nothing else; a torn last line waits for its end
    story.rollback(7)
    with story.paths.metrics_path(2).open("ab") as log:
        log.write(b'{"step":9,"t":1.0,"loss":')
    assert Projection(story.paths, default_uri(story.paths)).feed() == 0
    with story.paths.metrics_path(2).open("ab") as log:
        log.write(b"8.1}\n")
    assert Projection(story.paths, default_uri(story.paths)).feed() == 1
    assert runs(story, "launch")[1].data.tags["abandoned_after"] == "7"


@pytest.mark.filterwarnings("default")
def test_a_store_that_we_fed_is_imported_as_the_same_launches(tmp_path: Path, chronicle: Cli) -> None:
    """Read from the file, without mlflow, and through mlflow's own client: the same story."""
    story = toy_run(tmp_path)
    Projection(story.paths, default_uri(story.paths)).feed()
    (parent,) = runs(story, "run")
    assert chronicle("import", "logs/mlflow.db", "--run", "file").code == 0
    uri = default_uri(story.paths)
    assert chronicle("import", parent.info.run_id, "--as", "mlflow", "--uri", uri, "--run", "client").code == 0
    second = runs(story, "launch")[1].info.run_id
    assert chronicle("import", f"logs/mlflow.db#{second[:12]}", "--run", "one").code == 0
    shown = {name: chronicle("status", "--run", name, "--json").json for name in ("file", "client", "one")}
    told = {name: (x["step"], x["launch"], x["loss"], x["values"]["lr"]) for name, x in shown.items()}
    assert told == {"file": (8, 2, 8.2, 2.5e-5), "client": (8, 2, 8.2, 2.5e-5), "one": (8, 1, 8.2, 2.5e-5)}
    again = chronicle("import", f"logs/mlflow.db#{second[:12]}", "--run", "one")
    assert "imported before" in again.out


def test_sync_of_a_store_that_is_switched_off_sends_nothing_and_says_so(
    tmp_path: Path, chronicle: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy_run(tmp_path)
    monkeypatch.setenv("CHRONICLE_MLFLOW_URI", "off")
    done = chronicle("mlflow", "sync")
    assert done.code == 2 and "turned off (`off` in CHRONICLE_MLFLOW_URI)" in done.err
    assert chronicle("mlflow", "sync", "--uri", "off").code == 2
    assert not (tmp_path / "off").exists()


@pytest.mark.filterwarnings("default")
def test_the_mirror_feeds_from_its_own_process_and_ends_with_its_supervisor(tmp_path: Path) -> None:
    story = toy_run(tmp_path)
    code = (
        "import sys\nfrom pathlib import Path\nfrom chronicle.integrations.mlflow_process import start_mlflow_process\n"
        "from chronicle.paths import RunPaths\nhandle = start_mlflow_process(RunPaths(Path(sys.argv[1])))\n"
        "print(handle.pid, 'mlflow' in sys.modules, flush=True)\nsys.stdin.read()\n"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code, str(story.paths.run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert supervisor.stdout is not None
    pid, imported = supervisor.stdout.readline().split()
    assert imported == "False"
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait()
    supervisor.stdout.close()
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and "Z" not in _state(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(history(story, runs(story, "launch")[1].info.run_id, "loss")) == 3


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_a_server_that_is_down_is_one_sentence_and_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    story = toy_run(tmp_path)
    with pytest.raises(ChronicleError, match="does not accept data") as found:
        Projection(story.paths, "http://me:secret@127.0.0.1:9/").feed()
    assert "secret" not in found.value.message and "\n" not in found.value.message
    assert found.value.remedy is not None


def test_without_mlflow_the_mirror_is_one_line_and_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chronicle.integrations.mlflow_process.importlib.util.find_spec", lambda name: None)
    said: list[str] = []
    handle = start_mlflow_process(toy_run(tmp_path).paths, talk=said.append)
    assert (handle, len(said)) == (Beside(None), 1)
    handle.stop()
