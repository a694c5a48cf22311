"""trackio #125: a run that goes on from step 6 is written behind the abandoned points, as steps 11 and later."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

from tests.reproductions.case import Answer, Case
from tests.reproductions.wandb_1395 import exported

OWN = """
import os
os.environ.update(TRACKIO_DIR=os.path.abspath("own"), HF_HUB_OFFLINE="1")
import trackio
trackio.init(project="job", name="one")
for step in range(1, 11):
    trackio.log({"loss": 1111.0 + step})
trackio.finish()
trackio.init(project="job", name="one", resume="allow")
for step in range(6, 9):  # rolled back to step 5
    trackio.log({"loss": 7777.0 + step})
trackio.finish()
"""


def write_own(folder: Path) -> Path:
    """The database of such a run."""
    (folder / "own.py").write_text(OWN)
    subprocess.run([sys.executable, "own.py"], cwd=folder, capture_output=True, check=True, timeout=120)
    return folder / "own" / "job.db"


def bare(folder: Path) -> None:
    rows = sqlite3.connect(write_own(folder)).execute("select step, metrics from metrics order by step").fetchall()
    steps = {json.loads(metrics)["loss"]: step for step, metrics in rows}
    assert steps[1117.0] == 5 and steps[7783.0] == 10, "the new points count on behind the abandoned ones"


CASE = Case(
    row=33,
    source="trackio #125",
    pain="a run that resumes at an earlier step counts on behind its abandoned points",
    without="the abandoned points stay, and the new ones get other steps",
    answer=Answer.COMMAND,
    says=(r"5:1116 6:7783 7:7784 8:7785$",),
    bare=bare,
    guarded=exported,
    needs="trackio",
)
