"""The guard never changes training: losses with it and without it, to the last bit, on every adapter."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.guard.both_ways import train

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "rig", ["accelerate", "torch", pytest.param("transformers", marks=pytest.mark.slow), "lightning"]
)
def test_losses_of_save_and_resume_are_the_same_bits(rig: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guarded = train(rig, tmp_path / "guarded", guarded=True)
        bare = train(rig, tmp_path / "bare", guarded=False)
    assert len(guarded) >= 50 and len({loss for _, _, loss in guarded}) > 40
    assert guarded == bare


@pytest.mark.slow
@pytest.mark.parametrize(("rig", "num_ranks"), [("ddp", 2), ("zero", 2), ("deepspeed", 1)])
def test_losses_of_ranks_are_the_same_bits(rig: str, num_ranks: int, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    words = [*launcher, "-m", "tests.guard.both_ways", rig, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted((one["rank"], one["equal"]) for one in told) == [(rank, True) for rank in range(num_ranks)]
    assert all(one["steps"] >= 50 for one in told)
