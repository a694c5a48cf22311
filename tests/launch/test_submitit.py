"""submitit's `checkpoint()` protocol with the real submitit, in a job on this machine."""

import json
import os
import signal
import sys
import time

import pytest

from chronicle.integrations.submitit_job import SupervisedTraining
from chronicle.launch.processes import list_processes, read_command
from tests.launch.driver import ROOT

submitit = pytest.importorskip("submitit", reason="submitit is not installed")

TRAINER = """
import json, os, signal, sys, time
step = json.load(open("saved.json"))["step"] if os.path.exists("saved.json") else 0
first = step

def save(number, frame):
    time.sleep(1.0)
    json.dump({"step": step}, open("saved.json", "w"))
    sys.exit(0)

signal.signal(signal.SIGUSR1, save)
print("launch", os.environ["CHRONICLE_LAUNCH"], "starts at", first, flush=True)
open(f"started-{os.environ['CHRONICLE_LAUNCH']}", "w").close()
while step < first + 20 or first == 0:
    time.sleep(0.05)
    step += 1
"""


def test_a_preempted_job_saves_within_its_grace_and_is_requeued(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
    (tmp_path / "train.py").write_text(TRAINER)
    executor = submitit.LocalExecutor(tmp_path / "submitit", max_num_timeout=3)
    executor.update_parameters(timeout_min=5, signal_delay_s=20)
    words = ("--run", "demo", "--restarts", "3", "--grace", "10", "--", sys.executable, "train.py")
    job = executor.submit(SupervisedTraining(*words))
    until(lambda: (tmp_path / "started-1").exists())
    time.sleep(0.5)
    children = [one for one in list_processes() if one.parent == int(job.job_id)]
    task = next(one for one in children if "submitit" in " ".join(read_command(one.pid)))
    os.kill(task.pid, signal.SIGUSR2)  # as SLURM does, and as submitit's own local timeout does
    assert job.result() == 0
    printed = job.stdout()
    assert json.loads((tmp_path / "saved.json").read_text())["step"] > 0
    until(lambda: (tmp_path / "started-2").exists())
    supervisor = (tmp_path / "logs/demo/launches/0002/supervisor.log").read_text()
    assert f"launch 2 starts at {json.loads((tmp_path / 'saved.json').read_text())['step']}" in supervisor, printed


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
