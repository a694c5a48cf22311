"""The trainer's benchmarks run from their first line to their last: who has the machine for them meets no first-run crash."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bit_transformer.launches import ROOT


def _run(directory: Path, name: str, *words: str) -> str:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("CHRONICLE_")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / name), *words], cwd=directory, env=environ, text=True,
                          capture_output=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.sample
def test_mfu_runs_on_a_cpu_and_calls_its_numbers_no_gpus(tmp_path: Path) -> None:
    """The measuring code of the GPU table, every way to recompute; without `--device cpu` it says that there is no GPU."""
    table = _run(tmp_path, "trainer_mfu.py", "--device", "cpu", "--shape", "tiny", "--batch", "2", "--steps", "1",
                 "--recompute", "none", "checkpointing", "reversible").splitlines()
    assert "on a CPU: a trial of this program, no figure of a GPU" in table
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line.startswith("| tiny")]
    assert [row[2] for row in rows] == ["none", "checkpointing", "reversible"]
    assert all(row[1] == "17,218" and row[3] == "2" and float(row[6]) > 0 and row[7:] == ["?", "?"] for row in rows)


@pytest.mark.slow
def test_step_time_compares_two_loops_that_do_the_same(tmp_path: Path) -> None:
    """The losses of the bare loop and of the trainer are equal, else the ratio compares nothing."""
    for device in ("cpu", "auto"):
        told = json.loads(_run(tmp_path, "trainer_step_time.py", "--steps", "40", "--device", device).splitlines()[-1])
        assert told["steps_compared"] == 40 and told["largest_difference_of_losses"] < 1e-6
        assert told["pairs"] == 4 and told["ratio"] > 0.5


@pytest.mark.slow
def test_data_plan_of_a_hundred_million_samples_needs_no_memory_for_them(tmp_path: Path) -> None:
    """A rate for each batch size, and memory that does not grow with the samples: one bit each would be 12.5 MB."""
    told = json.loads(_run(tmp_path, "trainer_data_plan.py"))
    assert told["ids_per_second_by_batch"].keys() == {"16", "512", "4096"} and told["memory_growth_mb"] < 12.5


@pytest.mark.slow
def test_gpu_evidence_is_tried_on_a_cpu_gone_on_with_and_never_called_a_gpus(tmp_path: Path) -> None:
    """Two cells, one a call: the second call plays what is left, a third nothing; what was not played is in the table."""
    words = ("--device", "cpu", "--out", str(tmp_path), "--cells", "streams,memory")

    def call(*more: str) -> str:
        done = subprocess.run([sys.executable, "-m", "benchmarks.gpu_evidence", *words, *more], cwd=ROOT, text=True,
                              capture_output=True, timeout=250)  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    assert "no time left for memory" in call("--seconds", "45")  # the limits of the two cells are 40 and 60 seconds
    assert "memory: ok" in call() and "streams: ok" not in call()
    record = json.loads((tmp_path / "evidence.json").read_text())
    assert record["cells"]["streams"]["found"]["equal"] is True
    assert record["cells"]["memory"]["found"]["peak_by_formula"] is None  # a CPU keeps no count: said, not made up
    assert record["cells"]["resume-fsdp2"] == {"state": "not played", "why": "needs a GPU"}
    assert "no figure of a GPU" in (tmp_path / "evidence.md").read_text()
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu_evidence", "--cells", "nothing", "--device", "cpu"], cwd=ROOT,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 2 and "unknown cell `nothing`" in done.stderr
