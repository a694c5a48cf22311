"""`torchrun --max-restarts`: every start of the ranks is an attempt with its cause, its own steps, and its costs."""

import json
import os
import selectors
import subprocess
import sys
import time

import pytest

from chronicle.journal import JournalWriter
from chronicle.journal.costs import Cause, compute_costs
from chronicle.journal.lineage import compute_lineage
from chronicle.journal.reader import read_journal
from chronicle.launch.ranks import FirstFailure, RankDeath, RankWatch
from chronicle.launch.record import first_failures
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


def rank_process(attempt: int) -> subprocess.Popen[bytes]:
    own = {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    process = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"],
                               env=os.environ | own, stdout=subprocess.PIPE)  # fmt: skip
    with process.stdout:
        process.stdout.read(1)  # it runs under its own environment
    return process


def test_an_end_that_nobody_was_told_of_before_the_next_attempt_counts():
    """A busy machine: the rank has ended, was waited for, and another runs before the supervisor's turn comes."""
    seen = []
    watch = RankWatch(selectors.DefaultSelector(), clock=time.monotonic, on_attempt=lambda *one: seen.append(one[:2]))
    first = rank_process(0)
    try:
        watch.look()
        first.kill()
        first.wait()
        second = rank_process(1)
        try:
            watch.look()
        finally:
            second.kill()
            second.wait()
    finally:
        first.kill()
        first.wait()
        watch.close()
    ((attempt, death),) = seen
    assert (attempt, death.rank, death.pid) == (1, 1, first.pid)
    assert death.code in (-9, None)  # None: a kernel before 6.15


@pytest.mark.parametrize(
    ("deaths", "named", "told", "first"),
    [
        ([(0, 0.0, None), (1, 0.0, None)], [(101, 1, -9)], (), (1, -9)),  # found in one look, both waited for
        ([(0, 0.0, -15), (1, 3.0, -6)], [(100, 0, -15)], (), (0, -15)),
        ([(0, 0.0, -15)], [(101, 1, -9)], (), (1, -9)),  # it came and went unseen
        ([], [(101, 1, 1)], (), (1, 1)),
        ([], [(101, 1, 1)], (101,), None),  # that was the attempt before: this one ended on another node
        ([(0, 0.0, 1)], [(101, 1, -9)], (), (0, 1)),  # its end was seen, and nobody ended it
        ([(0, 0.0, 0), (1, 0.1, 1)], [], (), (1, 1)),  # rank 0 had finished: that is no failure
        ([(0, 0.0, 0)], [(101, 1, 1)], (), (1, 1)),
        ([(0, 0.0, 0), (1, 0.1, 0)], [], (), (0, 0)),
    ],
)
def test_where_order_or_code_was_not_seen_the_launchers_word_counts(deaths, named, told, first):
    words = [FirstFailure(pid=pid, local_rank=local, code=code) for pid, local, code in named]
    watch = RankWatch(selectors.DefaultSelector(), clock=time.monotonic, named=lambda: words)
    watch.deaths = [RankDeath(rank=rank, pid=100 + rank, time=at, code=code) for rank, at, code in deaths]
    watch._found, watch._expected, watch._told = {one[0] for one in deaths}, 2, set(told)
    found = watch.first_death()
    assert (None if found is None else (found.rank, found.code)) == first


def test_the_launchers_words_are_read_with_their_pids():
    printed = (
        b"E1123 12:29:11 820 elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1 (pid: 845) of binary: p\n"
        b"step 3\nE1123 12:29:13 820 api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 865) of binary: p\n"
    )
    (first, end), (second, last) = first_failures(printed)
    assert (first, second) == (FirstFailure(845, 1, 1), FirstFailure(865, 0, -9))
    assert printed[end:].startswith(b" of binary") and last > end
