"""Start `ranks_run.py` on gloo ranks."""

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["launch"]

ROOT = Path(__file__).parents[2]


def launch(folder: Path, *words: str, ranks: int = 2) -> tuple[int, str]:
    """Exit code and everything printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    script = str(Path(__file__).with_name("ranks_run.py"))
    done = subprocess.run(
        [*command, script, str(folder), *words], capture_output=True, text=True, env=environment, timeout=200, check=False
    )
    return done.returncode, done.stdout + done.stderr
