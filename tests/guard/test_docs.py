"""The adoption blocks of `docs/frameworks/` run as they stand."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chronicle.journal import read_journal
from chronicle.paths import RunPaths

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "frameworks").glob("*.md"))
TEXT = "".join(page.read_text(encoding="utf-8") for page in PAGES)
BLOCKS = dict(re.findall(r"```python (\w+)\n(.*?)```", TEXT, re.DOTALL))


@pytest.mark.parametrize(
    "name",
    [
        "accelerate",
        "torch",
        pytest.param("transformers", marks=pytest.mark.slow),
        pytest.param("lightning", marks=pytest.mark.slow),
    ],
)
def test_block_runs_and_is_guarded(name: str, tmp_path: Path) -> None:
    """In an empty directory, as a reader would try it; the guard's verdict then stands in the journal of the run."""
    script = tmp_path / "train.py"
    script.write_text(BLOCKS[name], encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CHRONICLE_RUN": "tr-190"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    kinds = [entry.kind for entry in read_journal(RunPaths(tmp_path / "logs" / "tr-190")).entries]
    assert "guard.verdict" in kinds


@pytest.mark.slow
def test_the_mean_of_a_trainers_run_is_no_point_of_its_loss(tmp_path: Path) -> None:
    """HF Trainer's last record has it as `train_loss`, at the last step."""
    pytest.importorskip("transformers")
    block = BLOCKS["transformers"].replace("save_steps=2", "save_steps=2, logging_steps=1")
    (tmp_path / "train.py").write_text(block, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    chronicle = [sys.executable, "-m", "chronicle_ml"]
    command = [*chronicle, "run", "--run", "r", "--", sys.executable, "train.py"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    log = [json.loads(line) for line in (tmp_path / "logs/r/launches/0001/metrics.jsonl").read_text().splitlines()]
    assert "train_runtime" in log[-1] and not any("train_loss" in line for line in log)
    words = [*chronicle, "log", "--graph", "--run", "r"]
    graph = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert f"loss {log[-2]['loss']:.4g}" in graph


def test_every_adapter_is_shown() -> None:
    assert set(BLOCKS) == {"accelerate", "transformers", "lightning", "torch"}
