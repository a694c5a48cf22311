"""The main job through the real commands: two ranks train, are rolled back with half the LR, pass the guard and go on.

The long version, with a real divergence, is `examples/demo.py`; it is a test here too, outside the fixed sample.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from chronicle.metrics import read_metrics
from chronicle.paths import RunPaths
from scripts.sample import BLOCK, sample

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
TRAIN = ["torchrun", "--standalone", "--nproc_per_node", "2", "-m", "bit_transformer.train", "--recipe", "demo"]
SHORT = ["--set", "checkpoint_every=10", "--set", "eval_every=20", "--set", "eval_windows=8"]


def chronicle(where: Path, *words: str, timeout: float = 240) -> "subprocess.CompletedProcess[str]":
    """Run one command as a user would, in a directory of its own."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    path = f"{BIN}{os.pathsep}{keep.get('PATH', '')}"
    environment = keep | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "chronicle.cli.main", *words],
        cwd=where, env=environment, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def learning_rates(where: Path, launch: int) -> dict[int, float]:
    """Step -> LR that this launch logged."""
    points = read_metrics(RunPaths(where / "logs" / "job").metrics_path(launch))
    return {point.step: point.values["lr"] for point in points}


def launch(where: Path, *words: str, guard: Sequence[str] = ()) -> "subprocess.CompletedProcess[str]":
    """`chronicle run` of the two-process trainer."""
    return chronicle(where, "run", "--", *TRAIN, *SHORT, *words)


@pytest.mark.slow
@pytest.mark.sample
def test_a_rollback_halves_every_later_lr_and_the_lineage_forgets_the_abandoned_steps(tmp_path: Path) -> None:
    """Launch 1 does 30 steps; back to 20 with half the LR; launch 2 repeats 21..30 with exactly half of what it was."""
    assert chronicle(tmp_path, "init", "--run", "job", "--checkpoints", "checkpoints").returncode == 0
    first = launch(tmp_path, "--stop-at", "30")
    assert first.returncode == 0, first.stderr[-3000:]
    no_terminal = chronicle(tmp_path, "rollback", "--to", "20", "--lr-scale", "0.5")
    assert no_terminal.returncode == 2, no_terminal.stderr
    assert (tmp_path / "checkpoints" / "opt_step-30").is_dir()
    done = chronicle(tmp_path, "rollback", "--to", "20", "--lr-scale", "0.5", "--yes")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "checkpoints" / "opt_step-30").exists()
    second = launch(tmp_path, "--stop-at", "30")
    assert second.returncode == 0, second.stderr[-3000:]
    before, after = learning_rates(tmp_path, 1), learning_rates(tmp_path, 2)
    assert sorted(before) == list(range(1, 31))
    assert sorted(after) == list(range(21, 31))
    assert {step: after[step] for step in after} == {step: before[step] * 0.5 for step in after}
    status = json.loads(chronicle(tmp_path, "status", "--json").stdout)
    assert (status["step"], status["launch"], status["lr"]["factor"]) == (30, 2, 0.5)
    entries = json.loads(chronicle(tmp_path, "log", "--json").stdout)
    assert [e["data"]["verdict"] for e in entries if e["kind"] == "guard.verdict"] == ["passed", "passed"]


@pytest.mark.slow
@pytest.mark.sample
def test_a_resume_whose_schedule_restarts_is_refused_before_its_first_step(tmp_path: Path) -> None:
    """exp9 of the seed: the LR begins its warm-up again; exit 78, not one step in the log."""
    assert chronicle(tmp_path, "init", "--run", "job", "--checkpoints", "checkpoints").returncode == 0
    assert launch(tmp_path, "--stop-at", "10").returncode == 0
    refused = launch(tmp_path, "--stop-at", "20", "--accident", "schedule-restarts")
    assert refused.returncode == 78, refused.stderr[-3000:]
    assert not RunPaths(tmp_path / "logs" / "job").metrics_path(2).exists() or learning_rates(tmp_path, 2) == {}


@pytest.mark.slow
def test_the_demo_tells_its_story(tmp_path: Path) -> None:
    """`examples/demo.py` ends with code 0 only when the run diverged, was proposed a step, and recovered."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py", "--directory", tmp_path / "demo"],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    printed = BLOCK.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert printed is not None and rows_of(printed[0]) == rows_of(sample(tmp_path / "demo"))


def rows_of(block: str) -> list[str]:
    """What each line of the README's sample is about: the name of the row, the mark of the graph."""
    return [line.split("  ")[0].split(" · ")[0] for line in block.splitlines() if not line.startswith(("run demo", " "))]
