"""`torchrun --max-restarts`: every start of the ranks is an attempt with its cause, its own steps, and its costs."""

import json
import selectors
import sys

import pytest

from chronicle.journal import JournalWriter
from chronicle.journal.costs import Cause, compute_costs
from chronicle.journal.lineage import compute_lineage
from chronicle.journal.reader import read_journal
from chronicle.launch.attempts import Attempts
from chronicle.launch.ranks import RankDeath, RankWatch
from chronicle.metrics.log import MetricsWriter, read_attempts, read_metrics
from chronicle.metrics.readers import read_log
from chronicle.paths import RunPaths

TRAINER = """
import json, os, pathlib, signal, subprocess, sys, time
from chronicle.metrics import MetricsWriter
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
first, last = [(1, 20), (11, 30), (26, 40), (31, 33)][attempt]
if rank == 0:
    log = MetricsWriter(pathlib.Path(os.environ["CHRONICLE_LAUNCH_DIR"]) / "metrics.jsonl") if sys.argv[1] == "writes" else None
    for step in range(first, last + 1):
        if log is not None:
            log.write(step, {"loss": 3.0})
        else:
            print(f"step {step} loss 3.0", flush=True)
        time.sleep(0.15 if attempt == 0 else 0.005)
    pathlib.Path(f"logged-{attempt}").touch()
    time.sleep(600)
while not pathlib.Path(f"logged-{attempt}").exists():
    time.sleep(0.005)
launcher = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
if sys.argv[1] == "writes" and attempt == 0:  # the supervisor stands until the last attempt is over: it sees none but this
    os.kill(int(launcher[1]), signal.SIGSTOP)
    go_on = f"while kill -0 {os.getppid()} && ! grep -q '^State:.Z' /proc/{os.getppid()}/status; do sleep .1; done; kill -CONT "
    subprocess.Popen(["sh", "-c", go_on + launcher[1]], start_new_session=True)
if attempt == 1:
    os.kill(os.getpid(), signal.SIGKILL)
raise KeyError(f"planned {attempt}")
"""


@pytest.mark.parametrize("how", ["writes", pytest.param("prints", marks=pytest.mark.slow)])
def test_each_attempt_has_a_cause_steps_of_its_own_and_costs(driver, how):
    """Known truth: 20 steps, back to 10; 30, back to 25; 40, back to 30; 33. All but the first are over before a look."""
    (driver.directory / "train.py").write_text(TRAINER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "3"]
    driver.start([*torchrun, "--monitor-interval", "0.1", "train.py", how], "--grace", "5")
    assert driver.wait(300) == 1, driver.out.read_text()[-3000:]
    begun = [entry.data for entry in driver.entries("launch.attempt")]
    assert [(one["attempt"], one["cause"]) for one in begun] == [(1, "crash"), (2, "crash"), (3, "crash")]
    assert "rank 1" in begun[0]["because"] and "KeyError: 'planned 0'" in begun[0]["because"]
    assert "SIGKILL" in begun[1]["because"]
    assert "KeyError: 'planned 2'" in begun[2]["because"]
    end = driver.entries("launch.end")[0].data
    assert "KeyError: 'planned 3'" in end["because"]
    assert end["attempts"] == [
        {"attempt": 0, "first_step": 1, "last_step": 20},
        {"attempt": 1, "first_step": 11, "last_step": 30},
        {"attempt": 2, "first_step": 26, "last_step": 40},
        {"attempt": 3, "first_step": 31, "last_step": 33},
    ]
    lineage = compute_lineage(read_journal(driver.paths).entries)
    assert lineage.launches[0].attempts == ((1, 20), (11, 30), (26, 40), (31, 33))
    costs = json.loads(driver.call("costs", "--json").stdout)
    assert [(one["cause"], one["from_step"], one["to_step"]) for one in costs["lost"]] == [
        ("crash", 20, 10), ("crash", 30, 25), ("crash", 40, 30),
    ]  # fmt: skip
    assert costs["repeated_steps"] == 25
    assert [one["cause"] for one in costs["interruptions"]] == [Cause.CRASH.value] * 4
    assert "attempt 2 of launch 1 begins" in driver.call("log").stdout


def test_whose_steps_they_are_is_carried_and_no_matter_of_the_clock(tmp_path, monkeypatch):
    """A clock that was set back between the attempts; the log is still read as ours, and holds no row more."""
    paths = RunPaths(tmp_path / "run")
    path = paths.metrics_path(1)
    for attempt, (first, last, now) in enumerate([(1, 20, 1000.0), (11, 12, 500.0), (11, 15, 400.0)]):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        with MetricsWriter(path, clock=lambda now=now: now) as log:
            for step in range(first, last + 1):
                log.write(step, {"loss": 3.0})
    pairs = list(read_attempts(path))
    assert [(attempt, point.step) for attempt, point in pairs if point.step in (12, 20)] == [(0, 12), (0, 20), (1, 12), (2, 12)]
    assert len(list(read_metrics(path))) == len(list(read_log(path))) == 27
    timed = [(point.step, point.time) for _, point in pairs]
    writer = JournalWriter(paths)
    writer.append("launch.start", launch=1, data={"host": "n1"})
    for attempt, cause in ((1, "hang"), (2, "crash")):
        writer.append("launch.attempt", launch=1, data={"attempt": attempt, "began": 2000.0, "cause": cause})
    found = compute_costs(read_journal(paths).entries, {1: timed}, {1: [attempt for attempt, _ in pairs]})
    assert [(one.cause, one.from_step, one.to_step) for one in found.lost] == [(Cause.HANG, 20, 10), (Cause.CRASH, 12, 10)]


@pytest.mark.parametrize(
    ("deaths", "first"),
    [
        ([(0, 0.0, None), (1, 0.0, None)], (0, None)),
        ([(0, 0.0, -15), (1, 0.01, 1)], (1, 1)),  # the launcher had to end the first
        ([(0, 0.0, -15)], None),  # one that was not seen was the first
        ([(0, 0.0, 1), (1, 0.1, -15)], (0, 1)),
        ([(0, 0.0, 0), (1, 0.1, 1)], (1, 1)),  # rank 0 had finished: that is no failure
        ([(0, 0.0, 0), (1, 0.1, 0)], (0, 0)),
    ],
)
def test_the_rank_that_failed_first_is_found_in_what_was_seen(deaths, first):
    watch = RankWatch(selectors.DefaultSelector())
    watch.deaths = [RankDeath(rank=rank, pid=100 + rank, time=at, code=code) for rank, at, code in deaths]
    watch._found, watch._expected = {one[0] for one in deaths}, 2
    found = watch.first_death()
    assert (None if found is None else (found.rank, found.code)) == first


def test_deaths_of_an_earlier_attempt_are_not_those_of_the_last_one():
    """Its ranks' environments have the restart count."""
    watch = RankWatch(selectors.DefaultSelector())
    watch.deaths = [RankDeath(rank=0, pid=100, time=0.0, code=1), RankDeath(rank=1, pid=201, time=9.0, code=-9)]
    watch._attempts = {100: 0, 101: 0, 200: 1, 201: 1}
    assert watch.first_death().pid == 201
    watch._attempts[300] = 2
    assert watch.first_death() is None


class Bench:
    """Two ranks of each attempt have said that they began; what was written down and said."""

    def __init__(self, directory, num_attempts):
        self.written, self.said = [], []
        for attempt in range(num_attempts):
            for rank in range(2):
                (directory / f"{attempt}-{rank}.attempt").write_text(f"{100 * attempt + rank} 7")
        self.attempts = Attempts(directory, host="n1", launch=1, write=self.write, say=self.said.append)

    def write(self, event, *, title):
        self.written.append((event.attempt, event.cause, event.because))


def test_an_attempt_is_written_down_with_the_launchers_word_and_the_last_exception(tmp_path):
    bench = Bench(tmp_path, 3)
    bench.attempts.take([b"[rank1]: KeyError: 'planned'", b"E1123 api.py:1] failed (exitcode: 1) local_rank: 1 (pid: 1)"])
    bench.attempts.note(0.0)
    assert bench.written == [(1, "crash", "rank 1 ended with code 1: KeyError: 'planned'")]
    assert bench.attempts.newer(0) == 1 and bench.attempts.newer(2) == 2
    bench.attempts.take([b"E1123 api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 100) of binary"])
    bench.attempts.note(1.0)
    assert bench.written[1][0] == 2 and "rank 0 was ended by SIGKILL" in bench.written[1][2] and len(bench.said) == 2


def test_a_word_that_does_not_come_is_waited_for_and_then_unknown(tmp_path):
    bench = Bench(tmp_path, 2)
    bench.attempts.note(0.0)
    assert not bench.written
    bench.attempts.note(60.0)
    assert bench.written[0][:2] == (1, "unknown")
    again = Bench(tmp_path, 2)
    again.attempts.note(0.0, is_last=True)
    assert len(again.written) == 1
