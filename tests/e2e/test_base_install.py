"""The base install: journal, inspect, verify, rollback and status work where torch, numpy and mlflow cannot be imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ["torch", "numpy", "mlflow", "accelerate", "deepspeed", "webdataset"]
EXTRAS += ["matplotlib", "plotly", "scipy", "statsmodels", "yaml", "pydantic"]
PROGRAM = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {extras}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Absent())
from chronicle.cli.main import main
main(sys.argv[1:])
"""


def without_extras(where: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in an interpreter in which no package of the extras can be found."""
    program = PROGRAM.format(extras=set(EXTRAS))
    keep = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=where, env=keep | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints by the real Accelerate, in the seed's layout."""
    where = tmp_path_factory.mktemp("base")
    program = """
import sys, torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.register_for_checkpointing(scheduler)
for step in range(1, 21):
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step(); scheduler.step(); optimizer.zero_grad()
    if step % 10 == 0:
        accelerator.save_state(f"{sys.argv[1]}/checkpoints/opt_step-{step}/accelerator_state")
"""
    subprocess.run([sys.executable, "-c", program, where], check=True, capture_output=True, timeout=120)
    return where


def test_a_whole_rollback_needs_none_of_the_extras(saved: Path) -> None:
    """Inspect, verify, roll back, look, undo: every command ends with 0 and names no missing module."""
    checkpoint = "checkpoints/opt_step-10"
    for words in (
        ("init", "--run", "base", "--checkpoints", "checkpoints"),
        ("note", "before"),
        ("inspect", checkpoint),
        ("verify", checkpoint),
        ("rollback", "--to", "10", "--lr-scale", "0.5", "--yes"),
        ("status",),
        ("log", "--graph"),
        ("undo", "--yes"),
        ("audit",),
        ("render", "--no-plots"),
    ):
        done = without_extras(saved, *words)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        assert "No module named" not in done.stderr
