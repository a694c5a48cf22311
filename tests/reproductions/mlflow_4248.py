"""mlflow #4248: a run that was killed and goes on is two runs in the tracker, and the killed one seems to run for ever."""

import subprocess
import sys
from pathlib import Path

from tests.reproductions.case import Answer, Case

STEPS = """
import os, signal, sys
first, last = int(sys.argv[1]), int(sys.argv[2])
for step in range(first, last + 1):
    {log}
    if step == 4 and first == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # preempted
"""
OWN = """
import mlflow
mlflow.set_tracking_uri("sqlite:///own.db")
mlflow.start_run()
"""
CHRONICLE = [sys.executable, "-c", "from chronicle_ml import main; main()"]


def play(folder: Path, script: str, prefix: list[str]) -> None:
    """Two launches: one is killed at step 4, one goes on to step 8."""
    (folder / "train.py").write_text(script)
    for words in (["1", "8"], ["4", "8"]):
        done = [*prefix, sys.executable, "train.py", *words]
        subprocess.run(done, cwd=folder, capture_output=True, check=False, timeout=120)


def runs(folder: Path, store: str) -> list[tuple[str, str, str]]:
    """(name, status, parent) of every run in the store."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/{store}")
    found = client.search_runs([one.experiment_id for one in client.search_experiments()])
    return [(one.info.run_name, one.info.status, one.data.tags.get("mlflow.parentRunId", "")) for one in found]


def bare(folder: Path) -> None:
    play(folder, OWN + STEPS.format(log='mlflow.log_metric("loss", 5.0 - step / 10, step=step)'), [])
    found = runs(folder, "own.db")
    assert len(found) == 2 and {parent for _, _, parent in found} == {""}
    assert sorted(status for _, status, _ in found) == ["FINISHED", "RUNNING"]


def guarded(folder: Path) -> str:
    log = 'print(f"step {step} loss {5.0 - step / 10:.3f} lr 1e-3", flush=True)'
    play(folder, STEPS.format(log=log), [*CHRONICLE, "run", "--run", "job", "--"])
    sync = [*CHRONICLE, "mlflow", "sync", "--run", "job"]
    synced = subprocess.run(sync, cwd=folder, capture_output=True, text=True, check=False)
    assert synced.returncode == 0, synced.stderr
    found = runs(folder, "logs/mlflow.db")
    parents = [name for name, _, parent in found if not parent]
    nested = sorted(f"{name}: {status}" for name, status, parent in found if parent)
    return f"one run {parents}, launches {nested}"


CASE = Case(
    row=34,
    source="mlflow #4248; WeatherGenerator #2437; lightly-train PR #334; NeMo-Automodel PR #2231",
    pain="a preempted run becomes two runs in MLflow, and the killed one stays RUNNING",
    without="two runs without a link; the first one runs for ever",
    answer=Answer.COMMAND,
    says=(r"one run \['job'\]", "'launch 1: (FAILED|KILLED)', 'launch 2: FINISHED'"),
    bare=bare,
    guarded=guarded,
)
