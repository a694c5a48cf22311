"""A real one-node SLURM, started by the test: signal, save, requeue, second launch. And one number for many nodes."""

import concurrent.futures
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from chronicle.launch.nodes import share_number
from chronicle.launch.processes import list_processes, read_environment, send_signal
from chronicle.launch.slurm import (
    ask_step_alive,
    exclude_from_job,
    format_sbatch,
    job_of,
    requeue_job,
    start_of,
)
from chronicle.paths import RunPaths
from tests.launch.driver import MARK, ROOT, free_port

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/munge/socket
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """munged, slurmctld and slurmd in a directory of their own; skipped with the reason where that is not possible."""
    missing = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing:
        pytest.skip(f"SLURM is not installed here (missing {', '.join(missing)}): Debian's slurm-wlm and munge")
    if os.geteuid() != 0:
        pytest.skip("slurmd starts jobs for other users and therefore wants root")
    base = tmp_path_factory.mktemp("slurm")
    environ = os.environ | {"SLURM_CONF": str(base / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    started = []
    try:
        start_daemons(base, environ, started)
        reason = wait_for_node(environ, base)
        if reason:
            pytest.skip(f"SLURM did not come up here: {reason}")
        yield environ
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        end_steps(environ["SLURM_CONF"])


def end_steps(conf):
    """Step daemons wait for a controller that is gone; ours are known by the configuration in their environment."""
    for process in list_processes():
        if (read_environment(process.pid) or {}).get("SLURM_CONF") == conf:
            send_signal(process, signal.SIGKILL)


def start_daemons(base, environ, started):
    for name in ("munge", "state", "spool"):
        (base / name).mkdir(mode=0o700)
    (base / "munge/key").write_bytes(secrets.token_bytes(1024))
    (base / "munge/key").chmod(0o400)
    host = socket.gethostname().split(".")[0]
    ports = {"control_port": free_port(), "node_port": free_port()}
    (base / "slurm.conf").write_text(CONFIG.format(base=base, host=host, cpus=os.cpu_count(), **ports))
    words = ("key-file", "socket", "pid-file", "log-file", "seed-file")
    munge = [f"--{word}={base}/munge/{word.removesuffix('-file')}" for word in words]
    for command in (
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D", "-f", str(base / "slurm.conf")],
        ["slurmd", "-D", "-f", str(base / "slurm.conf")],
    ):
        with open(base / f"{command[0]}.out", "wb") as out:
            started.append(subprocess.Popen(command, env=environ, stdout=out, stderr=out))
        if command[0] == "munged":
            until(lambda: (base / "munge/socket").exists(), 10)


def wait_for_node(environ, base):
    """None when the node is idle, else what SLURM says."""

    def state():
        done = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environ, capture_output=True, text=True)
        return done.stdout.strip() or done.stderr.strip()

    return None if until(lambda: state() == "idle", 30) else f"{state()}; {(base / 'slurmctld.out').read_text()[-300:]}"


def until(condition, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return bool(condition())


TRAINER = """
import os, signal, sys, time
from pathlib import Path

if Path("saved").exists():
    print("resumed from the save", flush=True)
    sys.exit(0)

def save(number, frame):
    time.sleep(1.0)
    Path("saved").write_text("all of it")
    sys.exit(1)

signal.signal(signal.SIGUSR1, save)
Path("running").touch()
time.sleep(600)
"""


@pytest.mark.slow
def test_warned_job_saves_requeues_and_goes_on_as_the_second_launch(slurm, driver):
    """`--signal` reaches the supervisor, the trainer saves within the grace, the script requeues, the journal says so."""
    wrapper = driver.directory / "chronicle"
    wrapper.write_text(f"#!/bin/sh\nexec {sys.executable} -m chronicle.cli.main \"$@\"\n")
    wrapper.chmod(0o755)
    (driver.directory / "train.py").write_text(TRAINER)
    script = format_sbatch("demo", [sys.executable, "train.py"], grace_seconds=20, again=("--restarts", "3"))
    (driver.directory / "job.sbatch").write_text(script)
    environ = slurm | {"PYTHONPATH": str(ROOT), MARK: driver.mark}
    environ["PATH"] = f"{driver.directory}:{environ['PATH']}"
    done = subprocess.run(
        ["sbatch", "--parsable", "job.sbatch"], cwd=driver.directory, env=environ, capture_output=True, text=True, check=True
    )
    job = done.stdout.strip()
    assert until(lambda: (driver.directory / "running").exists(), 60), (driver.directory / f"demo-{job}.out").read_text()
    subprocess.run(["scancel", "--signal=USR1", job], env=environ, check=True)
    assert until(lambda: driver.entries("launch.end"), 60)
    assert (driver.directory / "saved").read_text() == "all of it"
    assert driver.entries("launch.end")[0].data["signal"] == "SIGUSR1"
    assert until(lambda: len(driver.entries("launch.end")) == 2, 400), subprocess.run(
        ["scontrol", "show", "job", job], env=environ, capture_output=True, text=True
    ).stdout
    first, second = (entry.data["environment"] for entry in driver.entries("launch.start"))
    assert first["SLURM_JOB_ID"] == second["SLURM_JOB_ID"] == job
    assert second["SLURM_RESTART_COUNT"] == "1"
    assert driver.entries("launch.end")[1].data["exit_code"] == 0
    assert "resumed from the save" in driver.paths.supervisor_log(2).read_text()


def scheduler(job="", nodes=""):
    """A SLURM that answers from these words, and what it was asked to do."""
    asked = []

    def ask(words):
        asked.append(" ".join(words))
        if words[:3] == ("scontrol", "show", "hostnames"):
            return 0, "n1\nn2\n" if words[3] == "n[1-2]" else words[3].replace(",", "\n")
        if words[:3] == ("scontrol", "show", "job"):
            return 0, job
        return 0, ""

    return ask, asked


def test_excluded_nodes_go_to_a_waiting_job_and_come_back(tmp_path):
    """What a person excluded there stays; a node that was readmitted goes."""
    ask, asked = scheduler("JobId=7 JobState=PENDING ExcNodeList=n[1-2]")
    assert exclude_from_job("7", ("n3",), ("n2", "n3"), ask=ask) == ""
    assert asked[-1] == "scontrol update JobId=7 ExcNodeList=n1,n3"
    ask, asked = scheduler("JobId=7 JobState=PENDING ExcNodeList=n3")
    assert exclude_from_job("7", (), ("n3",), ask=ask) == ""
    assert asked[-1] == "scontrol update JobId=7 ExcNodeList="
    ask, asked = scheduler("JobId=7 JobState=RUNNING ExcNodeList=(null)")
    assert "is RUNNING" in exclude_from_job("7", ("n3",), ("n3",), ask=ask) and "update" not in asked[-1]


def test_a_requeue_leaves_excluded_nodes_out_and_asks_nothing_where_none_ever_was():
    ask, asked = scheduler("JobId=7 JobState=PENDING ExcNodeList=(null)")
    assert requeue_job("7", ("n2",), ("n2",), ask=ask) == ""
    assert asked[0] == "scontrol requeue 7" and asked[-1] == "scontrol update JobId=7 ExcNodeList=n2"
    ask, asked = scheduler()
    assert requeue_job("7", (), (), ask=ask) == "" and asked == ["scontrol requeue 7"]
    words = ["JobId=7 JobState=RUNNING", "JobId=7 JobState=COMPLETING ExcNodeList=(null)"]
    asked = []

    def slow(command):  # the requeue is not seen at once
        asked.append(" ".join(command))
        return 0, words.pop(0) if command[:3] == ("scontrol", "show", "job") else ""

    assert requeue_job("7", ("n2",), ("n2",), ask=slow, sleep=lambda seconds: None) == ""
    assert asked[-1] == "scontrol update JobId=7 ExcNodeList=n2"
    said = requeue_job("7", (), (), ask=lambda words: (1, "slurm_requeue error: Job is held\n"))
    assert said == "slurm_requeue error: Job is held"


def test_many_nodes_agree_on_one_launch_number(tmp_path):
    """The number is linked into place once; a number taken in vain is given back."""
    paths = RunPaths(tmp_path / "demo")
    paths.launch_dir(3).mkdir(parents=True)

    def take():
        for number in range(4, 100):
            try:
                paths.launch_dir(number).mkdir()
                return number
            except FileExistsError:
                continue
        raise AssertionError

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        numbers = list(pool.map(lambda _: share_number(paths, "77.0.1", take), range(64)))
    assert len(set(numbers)) == 1
    assert sorted(one.name for one in paths.launches_dir.glob("0*")) == ["0003", f"{numbers[0]:04d}"]
    assert share_number(paths, "77.1.0", take) != numbers[0]


def test_batch_script_warns_early_enough_and_leaves_bad_nodes_out():
    script = format_sbatch(
        "tr 190", ["torchrun", "a b.py"], grace_seconds=120, nodes=4, excluded=("n1", "n2"), again=("--restarts", "5")
    )
    assert "#SBATCH --signal=USR1@150" in script
    assert "#SBATCH --exclude=n1,n2" in script
    assert "run='tr 190'${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}\n" in script
    assert "chronicle run --run \"$run\" --node --grace 120 --restarts 5 -- torchrun 'a b.py'" in script
    stops = format_sbatch("tr", ["train"], grace_seconds=120, again=("--restarts", "5"), on_stall="stop")
    assert 'chronicle run --run "$run" --grace 120 --on-stall stop --restarts 5 -- train' in stops
    assert 'chronicle again --requeue --run "$run" --restarts 5 ||' in stops
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_a_task_of_an_array_is_named_by_the_array_and_its_number():
    """As the real SLURM answers; the plain number of the last task is that of the whole array."""
    environ = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "SLURM_STEP_ID": "0"}
    assert job_of(environ) == start_of(environ).job == "7_2"
    assert job_of({"SLURM_JOB_ID": "7"}) == "7"
    assert ask_step_alive("7_2", "0", ask=lambda words: (0, "7_2.0\n7_2.batch\n")) is True
    words = ("--checkpoints", "checkpoints/$SLURM_ARRAY_TASK_ID", "--restarts", "5")
    script = format_sbatch("tr", ["train"], grace_seconds=120, again=words)
    assert script.count('--checkpoints "checkpoints/$SLURM_ARRAY_TASK_ID" --restarts 5') == 2


def test_one_node_of_several_is_a_launch_with_its_own_log(driver):
    """`chronicle run --node` twice with one job: one launch number, one supervisor log a node, two journal writers."""
    job = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
    for node in ("0", "1"):
        code = f"print('node {node}')"
        driver.start([sys.executable, "-c", code], "--node", environ=job | {"SLURM_NODEID": node})
        assert driver.wait() == 0
    assert [entry.launch for entry in driver.entries("launch.start")] == [1, 1]
    assert len({entry.writer for entry in driver.entries("launch.start")}) == 2
    assert "node 0" in driver.paths.supervisor_log(1).read_text()
    assert "node 1" in (driver.paths.launch_dir(1) / "supervisor-node1.log").read_text()
    driver.start([sys.executable, "-c", "pass"], "--node")
    assert driver.wait() == 2
    driver.start([sys.executable, "-c", "pass"], "--sbatch", "2")
    assert driver.wait() == 0
    assert 'chronicle run --run "$run" --node --grace 90' in driver.out.read_text()
