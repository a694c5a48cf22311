"""Replays that are killed: KILL at a drawn moment, and every byte of the run is hashed before and after.

One recorded run of the plain script; the moments are spread over the time that a whole replay takes. What is left must be the
run as it was, and no process of the replay.
"""

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.replay.causes import ASKED, SMALL, digests, in_chronicle, quiet

RUN = ["--run", "small", "--logs", "logs", "--checkpoints", "checkpoints"]


def show(plays: int, seed: int) -> int:
    """Print the sums; returns how many kills left something behind."""
    draw = random.Random(seed)
    changed = alive = ended = 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).resolve()
        SMALL.lay(directory)
        in_chronicle(directory, quiet(), "run", *RUN, "--", *SMALL.command)
        begun = time.monotonic()
        in_chronicle(directory, quiet(), "replay", str(ASKED), *RUN)
        whole = time.monotonic() - begun
        for _ in range(plays):
            before = digests(directory)
            command = [sys.executable, "-m", "chronicle_ml", "replay", str(ASKED), *RUN]
            silent = subprocess.DEVNULL
            started = subprocess.Popen(command, cwd=directory, env=quiet(), stdout=silent, stderr=silent)
            time.sleep(whole * draw.uniform(0.05, 1.0))
            ended += started.poll() is not None
            started.kill()
            started.wait()
            alive += not _all_gone(directory)
            after = digests(directory)
            changed += any(after.get(path) != digest for path, digest in before.items())
    words = f"{plays - ended} of {plays} ({ended} had ended)"
    print(f"replays killed: {words}; runs that changed: {changed}; processes left: {alive}")
    return changed + alive


def _all_gone(directory: Path) -> bool:
    """Whether the processes that work in this directory end within a minute."""
    deadline = time.monotonic() + 60
    while _works_in(directory):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _works_in(directory: Path) -> bool:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink() == directory:
                return True
        except OSError:
            continue
    return False
