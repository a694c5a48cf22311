"""`chronicle run` feeds MLflow from a process of its own, and neither needs it nor waits for it."""

import sys
import time
from pathlib import Path

import pytest

from tests.e2e.test_main_job import chronicle

TRAINER = """
import os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from chronicle.metrics import MetricsWriter
with MetricsWriter(Path(os.environ["CHRONICLE_LAUNCH_DIR"]) / "metrics.jsonl") as log:
    for step in range(1, 6):
        log.write(step, {{"loss": 10.0 - step}})
"""
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.filterwarnings("default")
def test_a_launch_becomes_a_nested_run_below_the_run(tmp_path: Path) -> None:
    """DESIGN §5.7: parent run = run, nested run = launch with its own curve, in `sqlite:///logs/mlflow.db`."""
    pytest.importorskip("mlflow", reason="the mlflow extra is not installed")
    (tmp_path / "chronicle.toml").write_text('mlflow_uri = "local"\n')
    done = chronicle(tmp_path, "run", "--run", "job", "--", sys.executable, "-c", TRAINER.format(root=str(ROOT)))
    assert done.returncode == 0, done.stderr
    from mlflow import MlflowClient

    deadline = time.monotonic() + 120  # the feeding process may still be creating MLflow's tables
    nested: list[object] = []
    while not nested and time.monotonic() < deadline:
        time.sleep(0.5)
        if "still sends data" in done.stderr and _alive(done.stderr):
            continue
        client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/logs/mlflow.db")
        experiments = [e.experiment_id for e in client.search_experiments()]
        runs = client.search_runs(experiments, filter_string="attributes.run_name = 'launch 1'")
        nested = [(run.info.status, run.data.metrics["loss"]) for run in runs if "mlflow.parentRunId" in run.data.tags]
    assert nested == [("FINISHED", 5.0)]


def test_nothing_is_sent_where_nobody_asked(tmp_path: Path) -> None:
    """The process that feeds MLflow takes 230 MB and seconds of CPU: an installed mlflow is no request."""
    done = chronicle(tmp_path, "run", "--run", "job", "--", sys.executable, "-c", "pass")
    assert done.returncode == 0, done.stderr
    assert "MLflow" not in done.stderr and not (tmp_path / "logs/mlflow.db").exists()


def _alive(said: str) -> bool:
    pid = next(word for line in said.splitlines() if "still sends data" in line for word in line.split() if word.isdigit())
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
