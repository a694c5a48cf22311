"""Two nodes of one launch: hosts of their own by name and process table (namespaces), one file system between them."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.slurm.__main__ import make_checkpoints
from chronicle.cli.main import run as chronicle
from chronicle.errors import UsageProblem
from chronicle.launch.nodes import Node, Peers, Rounds, find_node, has_passed
from chronicle.paths import RunPaths
from chronicle.story import read_story
from tests.launch.driver import free_port
from tests.launch.pods import Pods, why_not

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

    def start(node, seconds, code, trainer=None):
        trainer = trainer or [sys.executable, "-c", TRAINER, str(node), str(seconds), str(code)]
        words = driver.chronicle("run", "--run", "demo", "--node", "--", *trainer)
        environ = driver.environ | {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NODEID": str(node)}
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


# --- who a node is, and the launches of pods


@pytest.mark.parametrize(
    ("environ", "node"),
    [
        ({"SLURM_JOB_ID": "77", "SLURM_NODEID": "3", "SLURM_RESTART_COUNT": "2", "SLURM_STEP_ID": "0"}, Node("77.2.0", 3)),
        ({"JOB_COMPLETION_INDEX": "1", "CHRONICLE_JOB": "0b1c-9"}, Node("0b1c-9", 1, in_rounds=True)),
        ({"PET_NODE_RANK": "2", "RANK": "5", "CHRONICLE_JOB": "tr"}, Node("tr", 2, in_rounds=True)),
        ({"RANK": "1", "WORLD_SIZE": "2", "CHRONICLE_JOB": "tr"}, Node("tr", 1, in_rounds=True)),  # the Training Operator's
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


def test_a_round_is_joined_once_and_a_later_one_ends_it(tmp_path):
    paths = RunPaths(tmp_path / "demo")
    first, second = (Rounds(paths, Node("tr", number, in_rounds=True)) for number in (0, 1))
    assert (first.handed(), second.joined()) == (0, 0)
    second.join(9)
    first.join(10)
    (paths.launches_dir / ".handed-tr.10").write_text("{}")
    (paths.launches_dir / ".handed-tr.2.44").write_text("{}")  # of another job, whose name is `tr.2`
    assert (first.handed(), first.joined(), second.joined()) == (10, 10, 9)
    assert not has_passed(paths, second.part(10)) and has_passed(paths, second.part(9))
    assert not has_passed(paths, Node("77.2.0", 1))  # SLURM's nodes have no rounds
    here = paths.launch_dir(4)
    here.mkdir(parents=True)
    peers = Peers(here, 1, 600.0)
    Peers(here, 0, 600.0).tell({"host": "n0", "cause": "unknown", "because": "gone", "stopped_by": "signal"})
    assert not peers.have_failed()  # it may be saving
    Peers(here, 0, 600.0).tell({"host": "n0", "cause": "unknown", "because": "its pod was replaced", "replaced": True})
    peers._next_look = 0.0
    assert peers.have_failed() and "its pod was replaced" in peers.said


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=f"pods as namespaces: {why_not()}")
def test_two_pods_are_one_launch_and_a_killed_one_takes_both_to_the_next(tmp_path):
    """Each pod is killed once: the other's part ends, and both go on from the last save."""
    made = make_checkpoints(tmp_path / "made", 300)
    pods = Pods("killed", tmp_path / "job", made, together=2, port=free_port())
    try:
        row = pods.play(2, random.Random("killed"))
    finally:
        pods.close()
    assert row["went_on"] == 2 and row["finished"] and row["wrong_resumes"] == [], row
    assert row["decisions"] == ["again", "again", "finished"] and row["pods"] == 4, row
    launches = {one["launch"]: set() for one in pods.truth()}
    for one in pods.truth():
        launches[one["launch"]].add(one["node"])
    assert launches == {1: {0, 1}, 2: {0, 1}, 3: {0, 1}}
