"""Launchers that do something else than they were told, with the real launchers."""

import os
import signal
import sys

from chronicle.launch.launchers import count_requested_ranks
from tests.launch.conftest import driver  # noqa: F401 the fixture
from tests.launch.driver import ACCELERATE

TRAINER = """
import os, socket
from chronicle.audit import describe_device, open_evidence
from chronicle.preflight import PreflightFailed, RankFacts, TrainerFacts, check_before_first_step

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = describe_device("cpu")
open_evidence().process(world_size=world, device=device)
facts = RankFacts(rank=rank, host=socket.gethostname(), pid=os.getpid(), device=device["id"])
try:
    check_before_first_step(TrainerFacts(ranks=(facts,), world_sizes_seen={"environment": world}))
except PreflightFailed as failed:
    print(f"refused: {failed}", flush=True)
    raise SystemExit(failed.exit_code)
print("training")
"""


def test_two_processes_were_asked_for_and_one_started(driver):  # noqa: F811
    """`accelerate launch --cpu --num_processes 2` starts one process in silence: seed 000's "4 GPUs", by a launcher."""
    script = driver.directory / "train.py"
    script.write_text(TRAINER)
    driver.start([*ACCELERATE, "--cpu", "--num_processes", "2", str(script)])
    assert driver.wait() != 0
    printed = driver.out.read_text()
    assert "refused: preflight PF04 devices: 2 devices requested, 1 in use" in printed
    assert "training" not in printed.splitlines()
    judged = driver.call("claim", "--ranks", "2", "ran on 2 ranks")
    assert judged.returncode == 5
    assert judged.stdout.startswith("CONTRADICTED  ranks 2: launch 1: 1 ranks recorded")


def test_what_a_launcher_is_asked_for_is_read_from_its_own_words_only():
    assert count_requested_ranks(["torchrun", "--nproc_per_node", "4", "--nnodes=2", "t.py"]) == 8
    assert count_requested_ranks(["accelerate", "launch", "--num_processes=2", "t.py", "--num_processes", "9"]) == 2
    assert count_requested_ranks(["torchrun", "--nproc_per_node", "auto", "t.py"]) is None
    assert count_requested_ranks(["python", "t.py", "-n", "7"]) is None
    assert count_requested_ranks(["srun", "-n", "16", "python", "t.py"]) == 16
    assert count_requested_ranks(["srun", "-N", "2", "/opt/bin/torchrun", "--nproc_per_node", "4", "t.py"]) == 8
    assert count_requested_ranks(["srun", "-n", "2", "torchrun", "--nproc_per_node=4", "t.py"]) == 8
    assert count_requested_ranks(["torchrun", "--nproc_per_node", "2", "-m", "trainer", "-n", "9"]) == 2
    assert count_requested_ranks(["python", "-m", "trainer", "-n", "9"]) is None
    assert count_requested_ranks(["srun", "-n", "2", "bash", "train.sh", "-n", "9"]) is None
    assert count_requested_ranks(["srun", "-n", "2", "./train.sh"]) is None
    assert count_requested_ranks(["torchrun", "--nnodes", "1:4", "--nproc_per_node", "2", "t.py"]) is None


def test_workers_of_a_failed_attempt_do_not_outlive_it(driver):  # noqa: F811
    """Seed 001: hundreds of `multiprocessing.spawn` children from 07:14 still alive 44 minutes later."""
    script = driver.directory / "train.py"
    script.write_text(
        "import multiprocessing, os, time\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    workers = [context.Process(target=time.sleep, args=(600,)) for _ in range(4)]\n"
        "    [worker.start() for worker in workers]\n"
        "    os._exit(1)  # out of memory: no clean-up of any kind\n"
    )
    driver.start([sys.executable, str(script)], "--grace", "3")
    assert driver.wait() == 1
    assert driver.left() == []
    end = driver.entries("launch.end")[0].data
    assert end["ended_processes"]["left"] == []


def test_trainer_that_forks_away_is_swept_after_its_supervisor_was_killed(driver):  # noqa: F811
    """Seed 001's advice was `pkill -f multiprocessing.spawn`: that ends other people's work. Ours is found by token."""
    driver.start_launcher("python", "ignore")
    os.kill(driver.process.pid, signal.SIGKILL)
    driver.wait()
    shown = driver.call("ps").stdout
    assert shown.count("orphan") == len(driver.left())
    assert driver.call("ps", "--sweep").returncode == 2
    assert driver.left() != []
    assert driver.call("ps", "--sweep", "--yes").returncode == 0
    assert driver.left() == []
