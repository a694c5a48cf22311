"""`torchrun --max-restarts`: every start of the ranks is an attempt with its cause, its own steps, and its costs."""

import json
import os
import selectors
import subprocess
import sys
import time

import pytest

from chronicle.journal.costs import Cause
from chronicle.journal.lineage import compute_lineage
from chronicle.journal.reader import read_journal
from chronicle.launch.ranks import FirstFailure, RankDeath, RankWatch
from chronicle.launch.record import first_failures

TRAINER = """
import json, os, pathlib, re, signal, time
from chronicle.metrics import MetricsWriter
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
first, last = [(1, 20), (11, 30), (26, 40)][attempt]
def noted():  # an attempt that is over before the supervisor looks, every two seconds, is not known by itself
    entries = "".join(path.read_text() for path in pathlib.Path(os.environ["CHRONICLE_RUN_DIR"], "journal").glob("*.jsonl"))
    return attempt == 0 or re.search(rf'"attempt": ?{attempt}\\b', entries)
while rank == 0 and not noted():
    time.sleep(0.05)
if rank == 0:
    with MetricsWriter(pathlib.Path(os.environ["CHRONICLE_LAUNCH_DIR"]) / "metrics.jsonl") as log:
        for step in range(first, last + 1):
            log.write(step, {"loss": 3.0})
            time.sleep(0.15 if attempt == 0 else 0.02)
    pathlib.Path(f"logged-{attempt}").touch()
    attempt < 2 and time.sleep(600)
while not pathlib.Path(f"logged-{attempt}").exists():
    time.sleep(0.05)
if rank == 1 and attempt == 0:
    raise KeyError("planned")
if rank == 1 and attempt == 1:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_each_attempt_has_a_cause_steps_of_its_own_and_costs(driver):
    """Known truth: 20 steps, back to 10; 30, back to 25; 40. Before: completed, 0 interruptions, 0 recomputed."""
    (driver.directory / "train.py").write_text(TRAINER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "3"]
    driver.start([*torchrun, "train.py"], "--grace", "5")
    assert driver.wait(300) == 0, driver.out.read_text()[-3000:]
    begun = [entry.data for entry in driver.entries("launch.attempt")]
    assert [(one["attempt"], one["cause"]) for one in begun] == [(1, "crash"), (2, "crash")]
    assert "rank 1" in begun[0]["because"] and "KeyError: 'planned'" in begun[0]["because"]
    assert "SIGKILL" in begun[1]["because"]
    assert driver.entries("launch.end")[0].data["attempts"] == [
        {"attempt": 0, "first_step": 1, "last_step": 20},
        {"attempt": 1, "first_step": 11, "last_step": 30},
        {"attempt": 2, "first_step": 26, "last_step": 40},
    ]
    lineage = compute_lineage(read_journal(driver.paths).entries)
    assert lineage.launches[0].attempts == ((1, 20), (11, 30), (26, 40))
    assert (lineage.kept[0].first, lineage.head_step) == (1, 40)
    costs = json.loads(driver.call("costs", "--json").stdout)
    assert [(one["cause"], one["from_step"], one["to_step"]) for one in costs["lost"]] == [("crash", 20, 10), ("crash", 30, 25)]
    assert costs["repeated_steps"] == 15
    assert [one["cause"] for one in costs["interruptions"]] == [Cause.CRASH.value, Cause.CRASH.value]
    assert all(one["recovered_seconds"] is not None for one in costs["interruptions"])
    assert "attempt 2 of launch 1 begins" in driver.call("log").stdout


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
