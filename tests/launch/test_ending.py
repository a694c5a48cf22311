"""Why launches end: one cause each, from what was seen. A real OOM kill and a real full disk; SLURM's words are given."""

import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chronicle.journal.costs import Cause, compute_costs
from chronicle.journal.events import EndCause
from chronicle.journal.reader import read_journal
from chronicle.launch.ending import (
    LostSupervisor,
    Seen,
    Steps,
    count_oom_kills,
    judge_end,
    judge_lost,
    last_exception,
)
from chronicle.launch.ranks import RankDeath, RankWatch
from chronicle.launch.slurm import JobStart, JobWord, ask_job, ask_past_state, is_over
from tests.launch.driver import LAUNCHERS

RUNNING = JobWord("RUNNING", seconds_left=9000.0)

TORCH_WRITE = "RuntimeError: PytorchStreamWriter failed writing file data/0"

CASES = [
    (Seen(), EndCause.ENDED),
    (Seen(steps=Steps(planned=16, begun=8, none_taken=True)), EndCause.EARLY),
    (Seen(steps=Steps(planned=16, begun=16, none_logged=True)), EndCause.FINISHED),  # nothing was left to do
    (Seen(steps=Steps(none_logged=True)), EndCause.EARLY),
    (Seen(steps=Steps(planned=16, begun=0, last=12)), EndCause.EARLY),
    (Seen(steps=Steps(planned=16, begun=0, last=15)), EndCause.FINISHED),  # its first step is 0
    (Seen(steps=Steps(planned=16, begun=0, last=10, stride=10)), EndCause.FINISHED),  # the next line would be of step 20
    (Seen(steps=Steps(last=3)), EndCause.ENDED),
    (Seen(steps=Steps(planned=16, begun=0, last=3, unread=True)), EndCause.ENDED),
    (Seen(killed="rank 0 was ended by SIGKILL", steps=Steps(last=3)), EndCause.CRASH),
    (Seen(killed="rank 0 was ended by SIGKILL", steps=Steps(planned=4, last=4)), EndCause.FINISHED),
    (Seen(exit_code=78, refused="step differs"), EndCause.REFUSED),
    (Seen(exit_code=143, stopped_by="proposal", stop_signal="SIGTERM"), EndCause.PROPOSAL),
    (Seen(exit_code=130, stopped_by="signal", stop_signal="SIGINT"), EndCause.STOPPED),
    (Seen(exit_code=138, stopped_by="signal", stop_signal="SIGUSR1"), EndCause.PREEMPTED),
    (Seen(exit_code=143, stopped_by="signal", stop_signal="SIGTERM", scheduler=RUNNING), EndCause.STOPPED),
    (
        Seen(exit_code=143, stopped_by="signal", stop_signal="SIGTERM", scheduler=RUNNING._replace(preempted=True)),
        EndCause.PREEMPTED,
    ),
    (
        Seen(
            exit_code=138,
            stopped_by="signal",
            stop_signal="SIGUSR1",
            scheduler=RUNNING._replace(seconds_left=100.0),
            lead_seconds=120.0,
        ),
        EndCause.TIME_LIMIT,
    ),
    (Seen(exit_code=143, stopped_by="signal", stop_signal="SIGTERM", scheduler=JobWord("NODE_FAIL")), EndCause.NODE_LOST),
    (Seen(exit_code=143, stopped_by="peer", peer="node hfn2 ended: out of memory"), EndCause.CRASH),
    (Seen(exit_code=1, launcher_code=1, rank=1, rank_code=-9, oom_kills=1), EndCause.OUT_OF_MEMORY),
    (Seen(exit_code=1, launcher_code=1, rank=1, rank_code=-11, oom_kills=1), EndCause.CRASH),  # not the one that was killed
    (Seen(exit_code=1, launcher_code=1, rank=1, rank_code=-9, oom_kills=0), EndCause.CRASH),
    (Seen(exit_code=137, launcher_code=-9, scheduler=JobWord("TIMEOUT")), EndCause.TIME_LIMIT),
    (
        Seen(exit_code=1, launcher_code=1, lines=("[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB",)),
        EndCause.OUT_OF_MEMORY,
    ),
    (Seen(exit_code=1, launcher_code=1, lines=("OSError: [Errno 28] No space left on device: 'ck'",)), EndCause.DISK_FULL),
    (Seen(exit_code=1, launcher_code=1, lines=(TORCH_WRITE,), full=("ck",)), EndCause.DISK_FULL),
    (Seen(exit_code=1, launcher_code=1, lines=(TORCH_WRITE,)), EndCause.CRASH),
    (
        Seen(exit_code=134, launcher_code=-6, lines=("[E] [Rank 0] Watchdog caught collective operation timeout: Work",)),
        EndCause.HANG,
    ),
    # an out of memory that was survived and a launcher's own report say nothing about this end
    (
        Seen(exit_code=1, launcher_code=1, lines=("CUDA out of memory, trying again", "ValueError: shapes (3,) and (4,)")),
        EndCause.CRASH,
    ),
    (
        Seen(exit_code=1, launcher_code=1, lines=("KeyError: 'x'", "torch.distributed.elastic...ChildFailedError:")),
        EndCause.CRASH,
    ),
]


@pytest.mark.parametrize("seen, cause", CASES, ids=[f"{number}-{case[1].name}" for number, case in enumerate(CASES)])
def test_every_end_has_one_cause_and_says_what_was_seen(seen, cause):
    ending = judge_end(seen)
    assert ending.cause is cause
    assert ending.because


def test_the_last_exception_is_the_ranks_own_not_the_launchers_report():
    lines = ["Traceback (most recent call last):", "[rank0]: KeyError: 'loss'", "  File x", "raise ChildFailedError(",
             "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "]  # fmt: skip
    assert last_exception(lines) == "KeyError: 'loss'"
    assert last_exception(["OSError: [Errno 28] No space left on device", "tried again", *lines]) == "KeyError: 'loss'"
    assert last_exception(["step 3 loss 2.0", "0 Errors so far"]) == ""


@pytest.mark.parametrize(
    "lines, said",
    [
        (["usage: train.py [-h]", "train.py: error: unrecognized: --lr"], "train.py: error: unrecognized: --lr"),
        (["[rank1]: error: gradients are not finite", "hint: roll back"], "error: gradients are not finite"),
        (["error: 3 rows were skipped", *["step 3 loss 2.0"] * 12], ""),  # survived
        (["mean absolute error: ", "error: looked for", "ValueError: none"], "ValueError: none"),
    ],
)
def test_a_program_that_ends_with_a_sentence_is_quoted(lines, said):
    assert last_exception(lines) == said


def test_a_launch_without_its_steps_says_how_many_are_missing():
    assert judge_end(Seen(steps=Steps(planned=16, begun=8, none_taken=True))).because == (
        "ended with code 0 after 0 of 8 planned steps"
    )
    assert "after 12 of 16 planned steps" in judge_end(Seen(steps=Steps(planned=16, last=12))).because


def test_a_vanished_supervisor_is_unknown_unless_somebody_knows():
    """Unknown is said, not guessed: a machine that still runs leaves no reason behind."""
    assert judge_lost(LostSupervisor("n1")).cause is EndCause.UNKNOWN
    assert judge_lost(LostSupervisor("n1", other_boot=True)).cause is EndCause.NODE_LOST
    assert judge_lost(LostSupervisor("n1", node_state="DOWN*+NOT_RESPONDING")).cause is EndCause.NODE_LOST
    assert judge_lost(LostSupervisor("n1", oom_kills=2)).cause is EndCause.OUT_OF_MEMORY
    assert judge_lost(LostSupervisor("n1", job="7", scheduler="TIMEOUT")).cause is EndCause.TIME_LIMIT
    rebooted = LostSupervisor("n1", job="7", restarted=True, node_restarted=True)
    assert judge_lost(rebooted).cause is EndCause.NODE_LOST
    again = judge_lost(LostSupervisor("n1", job="7", restarted=True))
    assert again.cause is EndCause.UNKNOWN and "does not say why" in again.because


# --- the scheduler's answers, as SLURM 22.05 printed them

PREEMPTED = (
    "JobId=2 JobName=job.sh UserId=root(0) JobState=RUNNING Reason=None Requeue=1 Restarts=0 RunTime=00:00:55 "
    "EndTime=2026-11-22T20:54:42 PreemptEligibleTime=2026-11-22T20:53:32 PreemptTime=2026-11-22T20:54:22 Partition=main\n"
)


def test_scontrol_is_read_and_silence_concludes_nothing():
    asked = ask_job("2", now=1795380867.0, ask=lambda words: (0, PREEMPTED))
    assert asked == JobWord("RUNNING", 0, preempted=True, seconds_left=15.0)
    assert ask_job("2", now=0.0, ask=lambda words: (0, PREEMPTED.replace("=2026-11-22T20:54:22", "=None"))).preempted is False
    assert ask_job("9", now=0.0, ask=lambda words: (1, "slurm_load_jobs error: Invalid job id specified\n")) == JobWord("")
    assert ask_job("9", now=0.0, ask=lambda words: (1, "slurm_load_jobs error: Unable to contact slurm controller\n")) is None
    assert ask_job("9", now=0.0, ask=lambda words: None) is None
    rows = "NODE_FAIL\nCANCELLED by 0\nRUNNING\n"
    assert ask_past_state("2", 0, ask=lambda words: (0, rows)) == "NODE_FAIL"
    assert ask_past_state("2", 1, ask=lambda words: (0, rows)) == "CANCELLED"
    assert ask_past_state("2", 0, ask=lambda words: (1, "Slurm accounting storage is disabled\n")) is None


def answers(job="RUNNING", restarts=0, steps="7.1"):
    def ask(words):
        return (0, steps) if words[0] == "squeue" else (0, f"JobId=7 JobState={job} Restarts={restarts} EndTime=Unknown")

    return ask


def test_a_start_of_a_job_is_over_only_by_the_schedulers_word():
    first = JobStart("7", 0, "1")
    assert is_over(first, JobStart("7", 1, "0"), now=0.0, ask=lambda words: None)  # one start at a time
    assert not is_over(first, None, now=0.0, ask=lambda words: None)  # no answer is no word
    assert not is_over(None, None, now=0.0, ask=answers())
    assert not is_over(first, None, now=0.0, ask=answers())
    assert is_over(first, None, now=0.0, ask=answers(job="CANCELLED"))
    assert is_over(first, None, now=0.0, ask=answers(restarts=1))
    assert is_over(first, None, now=0.0, ask=answers(steps="7.2"))  # its step has ended


# --- real ends


def end_of(driver):
    return driver.entries("launch.end")[-1].data


@pytest.mark.parametrize(
    ("deaths", "seen", "first"),
    [
        ([(1, 0.0, -9), (0, 0.1, -15)], 2, 1),
        ([(0, 0.0, -15), (1, 0.001, -9)], 2, 1),  # both found in one look
        ([(0, 0.0, -15), (1, 3.0, -6)], 2, 0),  # somebody ended rank 0, and the other one could not go on
        ([(0, 0.0, -15), (1, 0.001, -15)], 2, 0),
        ([(0, 0.0, -15)], 1, None),  # the other one came and went unseen
        ([(0, 0.0, -15)], 2, 0),
        ([(0, 0.0, 1)], 1, 0),
        ([], 0, None),
    ],
)
def test_a_rank_that_the_launcher_ended_was_not_the_first(deaths, seen, first):
    watch = RankWatch(selectors.DefaultSelector(), clock=time.monotonic)
    watch.deaths = [RankDeath(rank=rank, pid=100 + rank, time=at, code=code) for rank, at, code in deaths]
    watch._found, watch._expected = set(range(seen)), 2
    found = watch.first_death()
    assert (None if found is None else found.rank) == first


def test_a_rank_that_is_killed_is_a_crash_with_rank_and_signal(driver):
    script = driver.directory / "train.py"
    script.write_text(
        "import os, signal, time\nprint('up', flush=True)\ntime.sleep(1)\n"
        "os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)\n"
    )
    driver.start([*LAUNCHERS["torchrun"][0], str(script)], "--grace", "5")
    assert driver.wait() == 1
    end = end_of(driver)
    assert end["cause"] == "crash"
    assert "rank 1 was ended by SIGKILL" in end["because"]
    status = driver.call("status").stdout
    assert "ended with code 1: crash" in status and "rank 1 was ended by SIGKILL" in status
    costs = compute_costs(read_journal(driver.paths).entries, {})
    assert [one.cause for one in costs.interruptions] == [Cause.CRASH]


@pytest.mark.slow
def test_the_signal_that_ended_the_only_process_of_accelerate_is_named(driver):
    script = driver.directory / "train.py"
    script.write_text("import os, signal\nprint('up', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    driver.start([*LAUNCHERS["accelerate-1"][0], str(script)], "--grace", "5")
    assert driver.wait() == 1
    assert end_of(driver)["cause"] == "crash" and "rank 0 was ended by SIGSEGV" in end_of(driver)["because"]


WRITES = "open('small/ck', 'wb').write(b'x' * (1 << 20))"
TORCHS_WORDS = "raise RuntimeError('[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534')"


@pytest.mark.parametrize(
    "code, said", [(WRITES, "No space left on device"), (TORCHS_WORDS, "no room left in")], ids=["errno", "torch"]
)
def test_a_full_disk_is_a_full_disk(driver, tmp_path, code, said):
    """Nobody said that the run writes there, and torch does not say that the disk is full."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("no file system may be mounted here")
    try:
        driver.start([sys.executable, "-c", code])
        assert driver.wait() == 1
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert end_of(driver)["cause"] == "disk full"
    assert said in end_of(driver)["because"]


@pytest.fixture
def memory_group():
    """A memory cgroup with room for 200 MB; the supervisor is started inside it."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    first = next((path for _, name, path in groups if name == "memory"), None)
    where = Path("/sys/fs/cgroup/memory" + first if first is not None else "/sys/fs/cgroup") / f"test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if first is not None else "memory.max"
    try:
        where.mkdir()
        (where / limit).write_text(str(200 << 20))
        if (where / "memory.memsw.limit_in_bytes").exists():
            (where / "memory.memsw.limit_in_bytes").write_text(str(200 << 20))
    except OSError:
        pytest.skip("no memory cgroup may be made here")
    yield where
    where.rmdir()


def test_a_real_oom_kill_is_out_of_memory(driver, memory_group):
    """Seed: only `SIGKILL` was told, although `oom_kill 1` stood in the cgroup."""
    trainer = "x = []\nwhile True: x.append(bytearray(b'x') * (8 << 20))"
    inside = f"import os; open({str(memory_group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    command = driver.chronicle("run", "--run", driver.run, "--grace", "5", "--", sys.executable, "-c", trainer)
    code = f"{inside}os.execv({command[0]!r}, {command!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=driver.directory, env=driver.environ, timeout=120)
    assert done.returncode == 128 + signal.SIGKILL
    assert end_of(driver)["cause"] == "out of memory"
    assert "oom_kill" in end_of(driver)["because"]
    assert "out of memory" in driver.call("log").stdout


def test_counters_of_both_versions_are_read(tmp_path):
    """Version 1 under a mount of its own and version 2 below a root that is not `/`; no counter is not 0."""
    (tmp_path / "v1/pod").mkdir(parents=True)
    (tmp_path / "v1/pod/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (tmp_path / "v2/step").mkdir(parents=True)
    (tmp_path / "v2/step/memory.events").write_text("low 0\noom 1\noom_kill 2\noom_group_kill 0\n")
    mounts, own = tmp_path / "mountinfo", tmp_path / "cgroup"
    mounts.write_text(f"35 31 0:32 / {tmp_path}/v1 rw - cgroup cgroup rw,memory\n")
    own.write_text("4:memory:/pod\n0::/\n")
    assert count_oom_kills(own, mounts) == 3
    mounts.write_text(f"41 31 0:38 /slurm {tmp_path}/v2 rw - cgroup2 cgroup2 rw\n")
    own.write_text("0::/slurm/step\n")
    assert count_oom_kills(own, mounts) == 2
    own.write_text("0::/elsewhere\n")
    assert count_oom_kills(own, mounts) is None


def test_code_0_without_a_known_plan_says_that_the_plan_is_not_known() -> None:
    unknown = "(no planned step count was known)"
    assert judge_end(Seen(steps=Steps(last=12, begun=2))).because == f"ended with code 0 after 10 steps {unknown}"
    assert judge_end(Seen(steps=Steps(last=12))).because == f"ended with code 0 at step 12 {unknown}"
    assert judge_end(Seen()).because == f"ended with code 0 {unknown}"
