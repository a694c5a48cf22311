"""Every line that a verb prints about a stored run, whole: a change of words or of a row is seen, and meant."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.play_snapshot import RUNS, SNAPSHOTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", RUNS)
def test_what_every_verb_prints_about_a_stored_run(name: str) -> None:
    """After a change that is meant: `python -m tests.commands.play_snapshot --write`, and read the difference."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "TZ": "UTC"}
    words = [sys.executable, "-m", "tests.commands.play_snapshot", name]
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (SNAPSHOTS / f"{name}.txt").read_text(encoding="utf-8")
