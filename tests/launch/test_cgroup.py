"""A control group where one may be made: what slips out of the tree and drops its token is still held."""

import os
import signal
import sys
from pathlib import Path

import pytest

from chronicle.launch.containment import ControlGroup, describe_containment, make_group, open_group
from chronicle.launch.processes import read_process
from tests.launch.driver import is_alive

# forks twice, takes a session of its own and an empty environment: no parent, no token
ESCAPE = """
import os, sys, time
if os.fork():
    time.sleep(600)
os.setsid()
if os.fork():
    os._exit(0)
os.execve(sys.executable, [sys.executable, "-c", "import os,sys,time; open(sys.argv[1] + '.tmp','w').write(str(os.getpid()));"
          "os.rename(sys.argv[1] + '.tmp', sys.argv[1]); time.sleep(600)", sys.argv[1]], {})
"""


@pytest.fixture
def group():
    made = make_group("f" * 32, {})
    if made is None:
        pytest.skip("no control group of version 2 may be made here")
    yield made
    made.kill()
    made.remove()


@pytest.mark.parametrize("how", ["TERM", "KILL-supervisor"])
def test_a_process_without_parent_and_token_is_ended_all_the_same(group, driver, how):
    driver.start([sys.executable, "-c", ESCAPE, str(driver.directory / "pid")], "--grace", "1")
    driver.until((driver.directory / "pid").exists, "the process to escape")
    pid = int((driver.directory / "pid").read_text())
    start = driver.entries("launch.start")[0].data
    assert start["containment"] == "cgroup + subreaper + token"
    try:
        if how == "TERM":
            driver.process.terminate()
            assert driver.wait() == 143
        else:
            driver.process.kill()
            driver.wait()
            shown = driver.call("ps")
            assert f"{pid}" in shown.stdout and "cgroup" in shown.stdout
            assert driver.call("sweep", "--yes").returncode == 0
        assert not is_alive(pid)
        assert not os.path.exists(start["cgroup"])
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
    assert driver.left() == []


def test_inside_a_slurm_job_its_groups_are_left_alone(group):
    assert make_group("e" * 32, {"SLURM_JOB_ID": "7"}) is None


def test_only_a_group_that_we_named_is_ever_opened(group, tmp_path):
    (tmp_path / "cgroup.procs").write_text(str(os.getpid()))
    assert open_group(str(tmp_path)) is None
    assert open_group(None) is None
    assert open_group(str(group.path)).path == group.path


def test_what_is_in_force_is_said():
    assert describe_containment(True, ControlGroup(Path("/x"))) == "cgroup + subreaper + token"
    assert describe_containment(False).startswith("token only")
    assert not ControlGroup(Path("/x")).holds(os.getpid())
    assert ControlGroup(Path("/x")).processes() == [] and read_process(os.getpid()).alive
