"""`torchrun --max-restarts`: every start of the ranks is an attempt with its cause, its own steps, and its costs."""

import json
import sys

from chronicle.journal.costs import Cause
from chronicle.journal.lineage import compute_lineage
from chronicle.journal.reader import read_journal

TRAINER = """
import json, os, pathlib, signal, time
from chronicle.metrics import MetricsWriter
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
first, last = [(1, 20), (11, 30), (26, 40)][attempt]
if rank == 0:
    with MetricsWriter(pathlib.Path(os.environ["CHRONICLE_LAUNCH_DIR"]) / "metrics.jsonl") as log:
        for step in range(first, last + 1):
            log.write(step, {"loss": 3.0})
            time.sleep(0.15 if attempt == 0 else 0.08)  # a rank is looked for every two seconds
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
