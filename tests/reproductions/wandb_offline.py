"""A run that was logged offline by W&B, or into a trackio database, is to be brought in."""

import subprocess
from pathlib import Path

from tests.reproductions.case import Answer, Case
from tests.reproductions.trackio_125 import write_own
from tests.reproductions.wandb_1395 import CHRONICLE


def bare(folder: Path) -> None:
    assert write_own(folder).read_bytes().startswith(b"SQLite"), "only trackio itself reads its tables"


def guarded(folder: Path) -> str:
    words = [*CHRONICLE, "import", str(write_own(folder)), "--run", "old"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    return done.stdout + done.stderr


CASE = Case(
    row=32,
    source="users of offline W&B directories and of trackio",
    pain="an old run cannot be brought into another tool",
    without="its points stay in the tracker's own format",
    answer=Answer.COMMAND,
    says=("13 points",),
    bare=bare,
    guarded=guarded,
    needs="trackio",
)
