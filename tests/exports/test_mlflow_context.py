"""A script's own MLflow run says which launch made it: by the entry point of pyproject.toml, asked by MLflow itself."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, os
from mlflow.tracking.context.registry import resolve_tags
outside = resolve_tags()
os.environ |= {"CHRONICLE_RUN_DIR": "/logs/tr-190", "CHRONICLE_LAUNCH": "7"}
print(json.dumps([outside, resolve_tags()]))
"""


def test_mlflow_hears_of_the_launch_and_of_nothing_outside_one(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["mlflow.run_context_provider"]
    installed = tmp_path / "ours-1.dist-info"  # as an installation writes it
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    (installed / "entry_points.txt").write_text("\n".join(["[mlflow.run_context_provider]", *lines]) + "\n")
    keep = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    environ = keep | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True, cwd=tmp_path)
    outside, inside = ({k: v for k, v in tags.items() if k.startswith("chronicle.")} for tags in json.loads(done.stdout))
    assert outside == {}
    assert inside == {"chronicle.run": "tr-190", "chronicle.run_dir": "/logs/tr-190", "chronicle.launch": "7"}
