"""wandb #1395: after a rollback the steps are logged again, and W&B drops the new points."""

import subprocess
import sys
from pathlib import Path

from tests.reproductions.case import Answer, Case

OWN = """
import os
os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_ERROR_REPORTING="false")
import wandb
run = wandb.init(project="job", dir=".")
for step in range(1, 11):
    run.log({"loss": 1111.0 + step}, step=step)
for step in range(6, 9):  # rolled back to step 5
    run.log({"loss": 7777.0 + step}, step=step)
run.finish()
"""
LOOP = """
import sys
first, last, loss = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
for step in range(first, last + 1):
    print(f"step {step} loss {loss + step:.1f}", flush=True)
"""
CHRONICLE = [sys.executable, "-c", "from chronicle_ml import main; main()"]


def bare(folder: Path) -> None:
    (folder / "train.py").write_text(OWN)
    subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, check=True, timeout=120)
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    kept = file.read_bytes()
    assert b"1117" in kept, "the points before the rollback are there"
    assert b"7783" not in kept and b"7784" not in kept, "W&B kept the points after the rollback"


def exported(folder: Path) -> str:
    """The curve of a run that was launched twice: to step 10, and from step 6 to step 8."""
    (folder / "train.py").write_text(LOOP)
    for words in (["1", "10", "1111"], ["6", "8", "7777"]):
        launch = [*CHRONICLE, "run", "--run", "job", "--", sys.executable, "train.py", *words]
        subprocess.run(launch, cwd=folder, capture_output=True, check=True, timeout=120)
    export = [*CHRONICLE, "export", "--run", "job", "--format", "csv"]
    rows = subprocess.run(export, cwd=folder, capture_output=True, text=True, check=True).stdout.splitlines()
    names = rows[0].split(",")
    points = [dict(zip(names, row.split(","), strict=True)) for row in rows[1:]]
    return " ".join(f"{one['step']}:{float(one['loss']):.0f}" for one in points)


CASE = Case(
    row=31,
    source="wandb #1395, #2234, #4482; tango #152; rslearn PR #600",
    pain="points after a rollback are dropped by the tracker, or each preemption is another run",
    without="W&B keeps the abandoned points and drops the new ones",
    answer=Answer.COMMAND,
    says=(r"5:1116 6:7783 7:7784 8:7785$",),
    bare=bare,
    guarded=exported,
    needs="wandb",
)
