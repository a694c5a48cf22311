"""Plugin hooks of other tools, by the tools themselves: Hydra's callbacks. Skipped without them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import chronicle

ROOT = Path(__file__).parents[2]
HYDRA = """
import hydra
@hydra.main(version_base=None, config_path=None)
def main(config):
    print("lr", config.lr)
main()
"""
CALLBACK = "+hydra.callbacks.chronicle._target_=chronicle.integrations.hydra_callback.ChronicleCallback"


def under_chronicle(directory: Path, script: str, *words: str) -> str:
    (directory / "train.py").write_text(script, encoding="utf-8")
    keep = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    environ = keep | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "chronicle_ml", "run", "--run", "r", "--", sys.executable, "train.py", *words]
    done = subprocess.run(line, cwd=directory, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_hydra_tells_its_whole_configuration(tmp_path: Path) -> None:
    """Also what no override names, and a value that cannot be resolved."""
    pytest.importorskip("hydra")
    under_chronicle(tmp_path, HYDRA, CALLBACK, "+lr=3e-4", "+model.width=8", "+model.path=${oc.env:NOT_SET_ANYWHERE}")
    settings = chronicle.open(tmp_path / "logs" / "r").settings()
    assert settings["model.width"] == 8 and settings["lr"] == 3e-4
    assert settings["model.path"] == "${oc.env:NOT_SET_ANYWHERE}"
