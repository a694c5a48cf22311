"""Two nodes of one launch: hosts of their own by name and process table (namespaces), one file system between them."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest

from chronicle.cli.main import run as chronicle
from chronicle.errors import UsageProblem
from chronicle.launch.nodes import Node, find_node
from chronicle.story import read_story

TRAINER = """
import sys, time
from chronicle.audit import open_evidence
from chronicle.launch.ranks import open_rank_output
node, seconds, code = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
open_rank_output(node)
open_evidence(rank=node).process(world_size=2, device={"kind": "cpu", "id": f"node-{node}/1"})
print("working on node", node)
time.sleep(seconds)
sys.exit(code)
"""


@pytest.fixture
def nodes(driver):
    """Starts one `chronicle run --node` in namespaces of its own."""
    names = ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*names, "true"], capture_output=True).returncode != 0:
        pytest.skip("namespaces for hosts of their own cannot be made here: unshare wants root")
    started = []

    def start(node, seconds, code, trainer=None, pods=None):
        trainer = trainer or [sys.executable, "-c", TRAINER, str(node), str(seconds), str(code)]
        words = driver.chronicle("run", "--run", "demo", "--node", "--", *trainer)
        slurm = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NODEID": str(node)}
        environ = driver.environ | (slurm if pods is None else {"CHRONICLE_JOB": pods, "JOB_COMPLETION_INDEX": str(node)})
        host = ["sh", "-c", 'hostname "$0" && exec "$@"', f"node-{node}"]
        started.append(subprocess.Popen([*names, *host, *words], cwd=driver.directory, env=environ, stderr=subprocess.DEVNULL))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.sample
def test_two_nodes_are_one_launch_with_two_writers_and_the_worse_end(nodes, driver, monkeypatch):
    first, second = nodes(0, 1.0, 0), nodes(1, 1.0, 3)
    assert (first.wait(60), second.wait(60)) == (0, 3)
    starts, ends = driver.entries("launch.start"), driver.entries("launch.end")
    assert {one.launch for one in (*starts, *ends)} == {1}
    assert {one.data["host"] for one in starts} == {one.data["host"] for one in ends} == {"node-0", "node-1"}
    assert len({one.writer for one in starts}) == 2
    assert read_story(driver.paths).launch(1).outcome == "ended with code 3: crash"
    assert "working on node 1" in driver.paths.rank_log(1, 1).read_text()
    sealed = {end.data["host"]: {seal["path"] for seal in end.data["sealed"]} for end in ends}
    assert not sealed["node-0"] & sealed["node-1"]
    assert any(path.endswith("evidence/rank-1.jsonl") for path in sealed["node-1"])
    monkeypatch.chdir(driver.directory)
    assert chronicle(["audit", "--run", "demo"]) == 0
    assert chronicle(["claim", "--hosts", "2", "--ranks", "2", "on 2 nodes with 2 ranks", "--run", "demo"]) == 0


@pytest.mark.slow
def test_a_node_that_dies_is_named_by_ps_sweep_and_status(nodes, driver):
    first, second = nodes(0, 6.0, 0), nodes(1, 60.0, 0)
    driver.until(lambda: len(list(driver.paths.heartbeats_dir.glob("node-*.json"))) == 2, "both heartbeats")
    shown = driver.call("ps")
    assert "launch 1 on `node-0`: alive" in shown.stderr and "launch 1 on `node-1`: alive" in shown.stderr
    second.send_signal(signal.SIGKILL)  # the namespace and all in it dies with it, as a host does
    second.wait()
    assert first.wait(60) == 0
    assert "launch 1 on `node-1`" in driver.call("sweep").stderr
    outcome = read_story(driver.paths).launch(1).outcome
    assert outcome == "ended with code 0: finished, no end recorded on node-1"
    beat = driver.paths.heartbeats_dir / "node-1.json"
    beat.write_text(json.dumps(json.loads(beat.read_text()) | {"t": time.time() - 600}))
    assert "launch 1 on `node-1`: no recent sign of life, heartbeat 6" in driver.call("ps").stderr
    driver.start([sys.executable, "-c", "pass"])
    assert driver.wait() == 0
    assert driver.entries("launch.end")[1].data["host"] == "node-1"  # written by the next start, which knows that it is gone


STANDS = """
import json, pathlib, random, sys, time
node, how = int(sys.argv[1]), sys.argv[2]
def works(until):
    while time.time() < until:
        json.dumps([random.random() for _ in range(300)])
        sorted(str(random.random()) for _ in range(300))
def waits():
    while not pathlib.Path("done").exists():
        time.sleep(0.5)
for step in range(1, 110):
    if step == 90 and node == 1 and how == "works":
        works(time.time() + 45)
        pathlib.Path("done").touch()
    elif step == 90 and (node == 0 or how == "hangs"):
        waits()
    if node == 0: print(f"step {step} loss 2.0", flush=True)
    time.sleep(0.2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["works", "hangs"])
def test_a_node_that_waits_for_another_that_works_is_no_stall_and_two_that_stand_are(nodes, driver, how):
    script = driver.directory / "stands.py"
    script.write_text(STANDS)
    both = [nodes(number, 0.0, 0, trainer=[sys.executable, str(script), str(number), how]) for number in (0, 1)]
    if how == "works":
        assert [one.wait(200) for one in both] == [0, 0]
        assert driver.entries("incident") == []
    else:
        driver.until(lambda: len(driver.entries("incident")) == 2, "both nodes to say so", seconds=180)
        assert {tuple(one.data["hosts"]) for one in driver.entries("incident")} == {("node-0",), ("node-1",)}


# --- who a node is


@pytest.mark.parametrize(
    ("environ", "node"),
    [
        ({"SLURM_JOB_ID": "77", "SLURM_NODEID": "3", "SLURM_RESTART_COUNT": "2", "SLURM_STEP_ID": "0"}, Node("77.2.0", 3)),
        ({"JOB_COMPLETION_INDEX": "1", "CHRONICLE_JOB": "0b1c-9"}, Node("0b1c-9", 1)),
        ({"PET_NODE_RANK": "2", "RANK": "5", "CHRONICLE_JOB": "tr"}, Node("tr", 2)),
        ({"RANK": "1", "WORLD_SIZE": "2", "CHRONICLE_JOB": "tr"}, Node("tr", 1)),  # the Training Operator's
    ],
)
def test_a_node_is_who_its_scheduler_says(environ, node):
    assert find_node(environ) == node


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "nothing says which node of which job this is"),
        ({"SLURM_JOB_ID": "77"}, "nothing says which node of which job this is"),
        ({"CHRONICLE_JOB": "tr"}, "CHRONICLE_JOB is set, this node's number is not"),
        ({"JOB_COMPLETION_INDEX": "1"}, "this is node 1 (JOB_COMPLETION_INDEX), of which job is not known"),
        ({"JOB_COMPLETION_INDEX": "one", "CHRONICLE_JOB": "tr"}, "JOB_COMPLETION_INDEX is `one`"),
        ({"JOB_COMPLETION_INDEX": "1", "CHRONICLE_JOB": "a/b"}, "CHRONICLE_JOB is `a/b`"),
    ],
)
def test_what_is_not_said_is_asked_for_and_not_guessed(environ, said):
    with pytest.raises(UsageProblem) as problem:
        find_node(environ)
    assert said in problem.value.message and (problem.value.remedy or "expected" in problem.value.message)


def test_pods_are_started_again_together_and_one_that_comes_back_alone_is_refused(nodes, driver):
    """As a JobSet does it: its next start is another job, and the next launch of the run."""
    both = [nodes(number, 0.5, 0, pods="uid-1") for number in (0, 1)]
    assert [one.wait(60) for one in both] == [0, 0]
    assert nodes(1, 0.5, 0, pods="uid-1").wait(60) == 125  # its number and its host are those of a pod that took part
    both = [nodes(number, 0.5, 0, pods="uid-2") for number in (0, 1)]
    assert [one.wait(60) for one in both] == [0, 0]
    started = sorted((one.launch, one.data["host"]) for one in driver.entries("launch.start"))
    assert started == [(1, "node-0"), (1, "node-1"), (2, "node-0"), (2, "node-1")]
