"""A replaced pod takes over at once, where the kernel of both has let go of its predecessor's lock."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import LaunchStart
from chronicle.launch.admission import LaunchRefused, close_lost_launches, ensure_startable
from chronicle.launch.heartbeat import Heartbeat, is_free, lease_path, take_lease, write_heartbeat
from chronicle.launch.nodes import Node, find_node
from chronicle.launch.processes import read_boot_id
from tests.launch.driver import ROOT

OLD = "train-abc12"


@pytest.fixture
def left(driver):
    """A launch of another pod on this machine: no end, a young heartbeat. Returns what starts it with or without a lease."""

    def start(*, lease, boot=None):
        boot = boot or read_boot_id()
        with JournalWriter(driver.paths) as writer:
            writer.write(LaunchStart(host=OLD, pid=7, start_ticks=1, boot_id=boot, lease=lease), launch=1)
        beat = Heartbeat(host=OLD, launch=1, pid=7, start_ticks=1, boot_id=boot, uid=0, time=time.time(), processes=())
        assert write_heartbeat(driver.paths.heartbeats_dir, beat) is None
        return lease_path(driver.paths.heartbeats_dir, OLD)

    return start


def startable(driver):
    try:
        ensure_startable(driver.paths, read_journal(driver.paths), now=time.time())
    except LaunchRefused:
        return False
    return True


def test_a_lease_says_at_once_that_a_supervisor_on_the_same_kernel_is_gone(driver, left):
    path = left(lease=True)
    held = take_lease(path)
    assert not is_free(path) and not startable(driver)
    os.close(held)
    assert startable(driver)
    with JournalWriter(driver.paths) as writer:
        assert close_lost_launches(driver.paths, read_journal(driver.paths), writer) == [1]


def test_the_kernel_lets_go_of_a_lease_when_its_holder_is_killed(tmp_path):
    code = "import sys, time; from chronicle.launch.heartbeat import take_lease; from pathlib import Path\n" \
           "assert take_lease(Path(sys.argv[1])) is not None; print('held', flush=True); time.sleep(60)"
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "x.lease")], env=environ, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    assert not is_free(tmp_path / "x.lease")
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert is_free(tmp_path / "x.lease")


@pytest.mark.parametrize("told", [{"lease": False}, {"lease": True, "boot": "another machine"}])
def test_a_lock_that_tells_nothing_lets_nobody_in(driver, left, told):
    """Never taken, or taken on another machine, whose locks may not be seen here."""
    path = left(**told)
    path.touch()
    assert is_free(path) and not startable(driver)


def test_the_example_manifest_replaces_only_what_was_killed_from_outside():
    job = next(yaml.safe_load_all(Path(ROOT, "examples/kubernetes/job.yaml").read_text()))
    spec = job["spec"]
    failed = next(rule for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "FailJob")["onExitCodes"]
    assert failed["operator"] == "NotIn" and {137, 138, 143} <= set(failed["values"]) and 78 not in failed["values"]
    container = spec["template"]["spec"]["containers"][0]
    grace = int(container["command"][container["command"].index("--grace") + 1])
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > grace + 3 + 5
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert all(one["status"] == "True" for rule in spec["podFailurePolicy"]["rules"] for one in rule.get("onPodConditions", ()))
    whole = yaml.safe_load(Path(ROOT, "examples/kubernetes/jobset.yaml").read_text())
    assert whole["spec"]["replicatedJobs"][0]["template"]["spec"] == spec
    assert whole["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]


def test_the_manifest_of_two_pods_says_who_each_is_and_starts_all_of_them_again():
    (whole,) = yaml.safe_load_all(Path(ROOT, "examples/kubernetes/jobset-two-pods.yaml").read_text())
    spec = whole["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert whole["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 2 and spec["backoffLimit"] == 0
    (rule,) = spec["podFailurePolicy"]["rules"]  # no pod is replaced alone
    assert (rule["action"], rule["onExitCodes"]["operator"], rule["onExitCodes"]["values"]) == ("FailJob", "In", [78])
    container = spec["template"]["spec"]["containers"][0]
    told = {row["name"]: row["valueFrom"]["fieldRef"]["fieldPath"] for row in container["env"]}
    environ = dict.fromkeys(told, "made-up") | {"JOB_COMPLETION_INDEX": "1"}  # which an Indexed Job sets
    assert find_node(environ) == Node("made-up", 1)
    assert "controller-uid" in told["CHRONICLE_JOB"]
    assert {"--node", "--restarts"} <= set(container["command"]) and f"--nnodes={spec['completions']}" in container["args"]
