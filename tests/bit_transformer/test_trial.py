"""`chronicle preflight --full` with the real trainer: two starts, what comes back, and what does not is named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from tests.bit_transformer.launches import ROOT, TINY

SETTINGS = [word for setting in TINY for word in ("--set", setting)]

# a trainer whose schedule is saved and not loaded again: the failure of seed 003, experiment 9
FORGETFUL = """
import sys
from torch.optim.lr_scheduler import LambdaLR
LambdaLR.load_state_dict = lambda self, state: None
from bit_transformer.train import main
sys.exit(main())
"""

# a trainer that knows nothing of the request and logs its first step
UNAWARE = """
import os, time
with open(os.environ["CHRONICLE_LAUNCH_DIR"] + "/metrics.jsonl", "w") as log:
    log.write('{"v":1,"step":1,"t":1.0,"loss":1.0}\\n')
time.sleep(60)
"""


def preflight(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CHRONICLE_PREFLIGHT_STEPS": "12"}
    command = [sys.executable, "-m", "chronicle.cli.main", "preflight", "--run", "demo", *words]
    return subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A directory whose code has a digest: a pass may be reused there."""
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, "commit", "-q", "--allow-empty", "-m", "x"], cwd=tmp_path, check=True)
    return tmp_path


def verdicts(text: str) -> dict[str, str]:
    return {line[:4]: line.split()[1] for line in text.splitlines() if line.startswith("PF")}


@pytest.mark.slow
@pytest.mark.sample
def test_experiments_pass_once_are_reused_and_leave_nothing_of_the_run(repository: Path) -> None:
    trainer = ["--", sys.executable, "-m", "bit_transformer.train", *SETTINGS]
    first = preflight(repository, "--full", *trainer)
    assert first.returncode == 0, first.stdout + first.stderr
    found = verdicts(first.stdout)
    assert {name: found[name] for name in ("PF22", "PF25", "PF26", "PF27", "PF28")} == dict.fromkeys(
        ("PF22", "PF25", "PF26", "PF27", "PF28"), "pass")
    paths = RunPaths(repository / "logs" / "demo")
    journal = read_journal(paths)
    assert not list(journal.of_kind("checkpoint")) and not list(journal.of_kind("plan"))
    assert not list(paths.run_dir.glob(".preflight-*"))
    assert not list(paths.launches_dir.glob("*/metrics.jsonl"))
    second = preflight(repository, "--full", *trainer)
    assert "experiments of launch 2 are still valid" in second.stderr
    assert len(list(read_journal(paths).of_kind("launch.start"))) == 2
    (repository / "new.py").write_text("x = 1\n")  # other code: the pass no longer holds
    third = preflight(repository, "--full", *trainer)
    assert "experiments made by launch 4" in third.stderr


@pytest.mark.slow
def test_state_that_does_not_come_back_in_a_fresh_process_is_named(repository: Path) -> None:
    (repository / "forgetful.py").write_text(FORGETFUL)
    done = preflight(repository, "--full", "--", sys.executable, "forgetful.py", *SETTINGS)
    assert done.returncode == 3
    assert verdicts(done.stdout)["PF22"] == "fail"
    assert "schedule" in done.stdout


def test_a_trainer_that_begins_to_train_is_stopped_and_told_where_to_read(repository: Path) -> None:
    (repository / "unaware.py").write_text(UNAWARE)
    done = preflight(repository, "--full", "--", sys.executable, "unaware.py")
    assert done.returncode == 1
    assert "does not know CHRONICLE_PREFLIGHT=full" in done.stderr


def test_a_trainer_that_says_nothing_is_no_pass(repository: Path) -> None:
    done = preflight(repository, "--full", "--", sys.executable, "-c", "pass")
    assert done.returncode == 1
    assert "reported no results of its experiments" in done.stderr
