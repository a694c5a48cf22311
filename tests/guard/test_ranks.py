"""Two real gloo ranks: every rank refuses when one is wrong, and a save never waits for the other."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chronicle.resume.memory import RankDigest
from chronicle.resume.ranks import MAX_REPORT_BYTES, shorten_report
from rollback.manifest import read_manifest

ROOT = Path(__file__).parents[2]
REFUSED = {"refused": 78}


def play(run_dir: Path, checkpoint: Path, *acts: str) -> tuple[dict[str, dict[int, Any]], str]:
    """One torchrun of `ranks_worker.py` on two ranks: what each rank told per act, and stderr."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    worker = [str(Path(__file__).with_name("ranks_worker.py")), str(run_dir), str(checkpoint)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, *worker, *acts], capture_output=True, text=True, env=environment, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, dict[int, Any]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            record = json.loads(line)
            told.setdefault(record["act"], {})[record["rank"]] = record["told"]
    return told, done.stderr


def test_two_ranks_resume_exactly_and_one_wrong_rank_stops_both(run_dir: Path, tmp_path: Path) -> None:
    """The fast sample: save, a healthy resume, then rank 1 alone holds other weights or rank 0's generators."""
    checkpoint = tmp_path / "checkpoints" / "opt_step-6"
    told, stderr = play(
        run_dir,
        checkpoint,
        "save",
        "resume",
        "resume_with_other_weights_on_rank_1",
        "resume_with_copied_generators",
    )
    manifest = read_manifest(checkpoint)
    assert manifest is not None and manifest.memory is not None
    memory: Any = manifest.memory
    assert [item["rank"] for item in memory["ranks"]] == [0, 1]
    assert memory["ranks"][0]["rng"]["torch"] != memory["ranks"][1]["rng"]["torch"]
    assert memory["schedulers"][0]["unit"] == 2
    assert told["resume"] == told["save"]
    assert told["resume_with_other_weights_on_rank_1"] == {0: REFUSED, 1: REFUSED}
    assert stderr.count("resume refused before the first step") == 1
    assert "rank 1: sample of every tensor" in stderr
    assert told["resume_with_copied_generators"] == {0: REFUSED, 1: REFUSED}
    assert "this rank holds the generators of rank 0" in stderr


@pytest.mark.slow
def test_save_on_the_main_process_alone_waits_for_nobody(run_dir: Path, tmp_path: Path) -> None:
    """Such scripts are healthy without the guard: no collective may be added to their save."""
    told, _ = play(run_dir, tmp_path / "checkpoints" / "opt_step-6", "save_on_the_main_process")
    assert set(told["save_on_the_main_process"]) == {0, 1}


def test_a_report_between_ranks_stays_within_a_kilobyte() -> None:
    failed = [["name" * 10, "M1", "expected" * 7, "found" * 10, "where" * 8, "cause" * 18] for _ in range(30)]
    report = shorten_report({"rank": 3, "failed": failed})
    assert len(json.dumps(report, separators=(",", ":"))) <= MAX_REPORT_BYTES
    assert len(report["failed"]) + report["more"] == 30


def test_a_digest_of_a_rank_stays_within_a_kilobyte() -> None:
    rng = dict.fromkeys(("python", "numpy", "torch", "cuda:8"), "f" * 16)
    digest = RankDigest(rank=16383, rng=rng, weights="f" * 16, moments="f" * 16, data="f" * 16)
    assert len(json.dumps(digest.to_json(), separators=(",", ":"))) < 300
