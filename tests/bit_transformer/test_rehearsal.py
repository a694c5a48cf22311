"""`chronicle rehearse` with the real trainer: it resumes exactly, and a schedule that does not come back is named."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bit_transformer.launches import ROOT, TINY

SETTINGS = [word for setting in (*TINY, "checkpoint_every=4") for word in ("--set", setting)]

# a trainer whose schedule is saved and not loaded again: the failure of seed 003, experiment 9
FORGETFUL = """
import sys
from torch.optim.lr_scheduler import LambdaLR
LambdaLR.load_state_dict = lambda self, state: None
from bit_transformer.train import main
sys.exit(main())
"""


def rehearse(directory: Path, *words: str) -> tuple[int, dict[str, Any]]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "chronicle_ml", "rehearse", "--json", "--run", "demo", "--at", "4", "--to", "8", "--"]
    command += [sys.executable, *words, *SETTINGS, "--checkpoints", "{out}"]
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_the_trainer_resumes_exactly(tmp_path: Path) -> None:
    code, found = rehearse(tmp_path, "-m", "bit_transformer.train")
    assert (code, found["verdict"]) == (0, "resumes exactly"), found
    assert (found["resumed_at"], found["compared_at"]) == (4, 8) and found["leaves"] > 100


@pytest.mark.slow
def test_a_schedule_that_does_not_come_back_in_a_fresh_process_is_named(tmp_path: Path) -> None:
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    code, found = rehearse(tmp_path, "forgetful.py")
    assert code == 5 and any("last_epoch" in one["what"] for one in found["findings"]), found["findings"]
