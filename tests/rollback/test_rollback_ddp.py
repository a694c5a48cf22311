"""Two real ranks: a prepared scheduler counts two per step, and both ranks use exactly half after the rollback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chronicle.cli.main import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HERE = Path(__file__).resolve()


def ranks(action: str, root: Path, step: int, how: str, case: str) -> dict[int, list[list[float]]]:
    """The LRs each rank used."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    words = [str(HERE.with_name("ddp_run.py")), action, str(root), str(step), how, case]
    paths = os.pathsep.join([str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")])
    environ = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False, env=environ, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return {int(rank): json.loads(used) for rank, used in re.findall(r"RANK (\d) (\[\[.*?\]\])", done.stdout)}


@pytest.mark.parametrize(
    "how, case", [("prepared", "cosine_with_floor"), ("prepared", "lambda"), ("registered", "one_cycle")]
)
def test_both_ranks_use_exactly_half_and_the_forecast_was_right(tmp_path: Path, how: str, case: str) -> None:
    root = tmp_path / "checkpoints"
    ranks("save", root, 10, how, case)
    control = ranks("load", root, 10, how, case)
    assert sorted(control) == [0, 1]
    places = ["--run", "r", "--logs", str(tmp_path / "logs"), "--checkpoints", str(root)]
    assert run(["rollback", "--to", "10", "--lr-scale", "0.5", "--yes", *places]) == 0
    used = ranks("load", root, 10, how, case)
    for rank in (0, 1):
        assert used[rank] == [[lr / 2 for lr in row] for row in control[rank]]
    contract = json.loads((tmp_path / "logs" / "r" / "contract.json").read_text())
    assert contract["world_size"] == 2
    if case != "lambda":
        assert contract["next_lrs"] == used[0][:20]
    counter = contract["schedulers"][0]["last_epoch"]
    assert counter == (20 if how == "prepared" else 10)
