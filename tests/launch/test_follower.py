"""The second process of a launch: its death, what it asks for, and the time that it gets at the end."""

import os
import selectors
import signal
import sys

from chronicle.launch.processes import list_processes, read_command
from chronicle.launch.second import MOST_STARTS, Second
from chronicle.metrics.log import read_metrics

SPIKE = """
import time
for step in range(1, 401):
    time.sleep(0.01)
    print(f"step {step} loss {9.0 if step == 300 else 2.0 + step % 7 / 100}", flush=True)
"""


def follower_of(driver):
    """The pid of the second process; None where there is none now."""
    below = [one for one in list_processes() if one.parent == driver.process.pid and one.alive]
    return next((one.pid for one in below if "chronicle.launch.follower" in read_command(one.pid)), None)


def test_another_follower_goes_on_where_one_was_killed_and_nothing_is_lost_or_told_twice(driver):
    driver.start([sys.executable, "-c", SPIKE])
    log = driver.paths.launch_dir(1) / "supervisor.log"
    driver.until(lambda: log.exists() and b"step 20 " in log.read_bytes() and follower_of(driver) is not None, "steps")
    killed = follower_of(driver)
    os.kill(killed, signal.SIGKILL)
    driver.until(lambda: follower_of(driver) not in (killed, None), "another one")
    assert driver.wait() == 0
    assert [point.step for point in read_metrics(driver.paths.metrics_path(1))] == list(range(1, 401))
    spikes = [entry for entry in driver.entries("incident") if entry.data["kind"] == "instant-spike"]
    assert [entry.data["change"] for entry in spikes].count("opened") == 1
    assert "the process that reads the output ended (SIGKILL): another one goes on" in driver.out.read_text()
    assert not (driver.paths.launch_dir(1) / ".follower.json").exists()
    assert driver.entries("launch.end")[0].data["last_step"] == 400 and driver.left() == []


class Bench:
    """A `Second` whose process is a script, with a clock that is set by hand."""

    def __init__(self, selector, code, monkeypatch):
        self.now, self.said = 0.0, []
        monkeypatch.setattr("chronicle.launch.second.COMMAND", (sys.executable, "-c", code))
        self.second = Second({}, selector, say=self.said.append, clock=lambda: self.now)
        self.selector = selector

    def pump(self, seconds):
        """What the supervisor does meanwhile."""
        self.now += 1.0
        for key, _ in self.selector.select(0.0 if self.second.pid is None else 1.0):
            key.data()
        if self.second.pid is not None and (ended := os.waitpid(self.second.pid, os.WNOHANG))[0]:
            self.second.ended(ended[0], os.waitstatus_to_exitcode(ended[1]))
        return False


def test_what_it_says_asks_and_has_done_reaches_the_supervisor(monkeypatch):
    tells = """if True:
        import json, sys
        sys.stdin.readline()
        for words in ({"say": "a spike"}, {"stop": "stall", "words": "rank 1"}, {"done": True, "printed": True}):
            print(json.dumps(words), flush=True)
        sys.stdin.read()"""
    with selectors.DefaultSelector() as selector:
        bench = Bench(selector, tells, monkeypatch)
        bench.second.start()
        bench.second.finish(bench.pump, stopped=False)
        assert bench.said == ["a spike"] and bench.second.asked == "stall" and bench.second.heard["printed"] is True


def test_one_that_never_comes_to_the_end_is_ended_and_said(monkeypatch):
    with selectors.DefaultSelector() as selector:
        bench = Bench(selector, "import time; time.sleep(600)", monkeypatch)
        bench.second.start()
        pid = bench.second.pid
        bench.second.finish(bench.pump, stopped=True)
        assert "was not read to its end" in bench.said[-1]
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def test_one_that_always_dies_is_not_started_for_ever(monkeypatch):
    with selectors.DefaultSelector() as selector:
        bench = Bench(selector, "raise SystemExit(3)", monkeypatch)
        bench.second.start()
        for _ in range(200):
            bench.pump(1.0)
            bench.second.look()
        assert sum("ended (code 3)" in line for line in bench.said) == MOST_STARTS - 1
        assert "nobody reads it" in bench.said[-1] and bench.second.pid is None
