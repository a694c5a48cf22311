"""A killed supervisor is replaced by its keeper, by the kernel's word, and what it left is ended first."""

import os
import signal
import sys
import time

import pytest

from chronicle.journal import JournalWriter
from chronicle.journal.events import LaunchStart
from chronicle.launch.admission import close_lost_launches
from chronicle.launch.keeper import Killed, keep_supervised
from chronicle.launch.nodes import Node, Peers, share_number
from chronicle.launch.processes import read_boot_id
from chronicle.launch.provenance import host_name
from chronicle.launch.restarts import stand_down
from chronicle.settings import load_settings
from tests.launch.driver import is_alive

TRAINER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0 if "saves" in sys.argv else 5))
launch = int(os.environ["CHRONICLE_LAUNCH"])
open(f"trainer-{launch}", "w").write(str(os.getpid()))
print("launch", launch, flush=True)
if launch == 1 and sys.argv[1:] and sys.argv[1].startswith("SIG"):
    os.kill(os.getppid(), getattr(signal, sys.argv[1]))
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(0.1)
while launch == 1 or "wait" in sys.argv:
    time.sleep(0.1)
    if os.path.exists("go on"):
        sys.exit(0)
"""


def start(driver, *arguments):
    (driver.directory / "train.py").write_text(TRAINER)
    options = ("--restarts", "3", "--restart-pause", "0.1", "--grace", "1")
    driver.start([sys.executable, "train.py", *arguments], *options)


@pytest.mark.parametrize("arguments", [("SIGKILL",), ("SIGSEGV", "deaf")])
def test_a_killed_supervisor_is_replaced_and_its_launch_has_a_cause(driver, arguments):
    """Nothing of the first launch is alive when the second one begins, also where a rank does not hear TERM."""
    start(driver, *arguments)
    driver.until(lambda: (driver.directory / "trainer-2").exists(), "the second launch")
    assert not is_alive(int((driver.directory / "trainer-1").read_text()))
    assert driver.wait() == 0
    first, second = driver.entries("launch.end")
    assert first.data["cause"] == "crash" and f"was ended by {arguments[0]}" in first.data["because"]
    assert second.data["cause"] == "ended"
    assert [entry.data["decision"] for entry in driver.entries("restart")] == ["again", "ended"]
    assert driver.left() == []


@pytest.mark.parametrize("how", ["fails", "saves"])
def test_a_signal_to_the_keeper_ends_the_launch_and_nothing_is_replaced(driver, how):
    """A trainer that saves and returns 0 has not finished: a Kubernetes Job would take a 0 for that."""
    start(driver, how)
    driver.until(lambda: (driver.directory / "trainer-1").exists(), "the first launch")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 143
    assert driver.entries("launch.end")[0].data["cause"] == "stopped by a person"
    assert len(driver.entries("launch.start")) == 1 and driver.left() == []


def test_where_the_keeper_is_killed_the_supervisor_goes_on(driver):
    start(driver)
    driver.until(lambda: (driver.directory / "trainer-1").exists(), "the first launch")
    driver.process.kill()
    driver.process.wait()
    assert is_alive(driver.entries("launch.start")[0].data["pid"])
    (driver.directory / "go on").touch()
    end = time.monotonic() + 60
    while not driver.entries("restart") and time.monotonic() < end:
        time.sleep(0.05)
    assert driver.entries("restart")[0].data["decision"] == "ended"


def test_a_work_that_is_killed_for_ever_ends_with_its_signal():
    said = []

    def work(killed):
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    code = keep_supervised(work, most=2, pause_seconds=0.0, say=said.append, explain=lambda problem: 1)
    assert code == 137 and len(said) == 2


def test_an_error_and_a_code_of_the_work_are_the_keepers():
    def fails(killed):
        raise KeyError("x")

    assert keep_supervised(fails, most=2, pause_seconds=0.0, say=print, explain=lambda problem: 7) == 7
    assert keep_supervised(lambda killed: 78, most=2, pause_seconds=0.0, say=print, explain=lambda problem: 1) == 78


def test_the_end_of_a_killed_supervisor_is_of_that_process_only(driver):
    """Another launch whose supervisor is gone as well keeps `unknown`."""
    with JournalWriter(driver.paths) as writer:
        for launch, pid in ((1, 99999998), (2, 99999999)):
            start = LaunchStart(host=host_name(), pid=pid, start_ticks=1, boot_id=read_boot_id(), token=f"t{launch}")
            writer.write(start, launch=launch)
    from chronicle.journal import read_journal

    with JournalWriter(driver.paths) as writer:
        close_lost_launches(driver.paths, read_journal(driver.paths), writer, Killed(99999999, signal.SIGKILL))
    assert [entry.data["cause"] for entry in driver.entries("launch.end")] == ["unknown", "crash"]


def test_of_several_nodes_the_others_hear_that_a_supervisor_was_killed(driver):
    settings = load_settings(driver.directory, {}, run="demo")
    number = share_number(driver.paths, "7.0.0", lambda: driver.paths.launch_dir(4).mkdir(parents=True) or 4)
    assert number == 4
    assert stand_down(settings, Node("7.0.0", 0), 5.0, Killed(99999999, signal.SIGKILL)) == 137
    now = [0.0]
    peer = Peers(driver.paths.launch_dir(4), 1, 5.0, clock=lambda: now[0])
    peer.have_failed()
    now[0] = 70.0
    assert peer.have_failed() and "was ended by SIGKILL" in peer.said
    assert "was ended by SIGKILL" in (driver.paths.launches_dir / ".handed-7.0.0").read_text()
