"""What the everyday commands import. A login node answers `chronicle status` in a tenth of a second or not at all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.story_runs import toy_run

HEAVY = ("torch", "mlflow", "numpy", "pydantic", "matplotlib", "plotly", "pandas", "accelerate", "rich")
PROBE = """
import json, sys
from chronicle.cli.main import run
code = run({words!r})
sys.stderr.write("\\n" + json.dumps([code, sorted({{name.split(".")[0] for name in sys.modules}})]))
"""


@pytest.mark.parametrize(
    "words",
    [
        ["note", "hello"],
        ["status"],
        ["status", "--json"],
        ["log", "--graph"],
        ["show", "00000006"],
        ["audit"],
        ["close", "00000006", "--outcome", "worked"],
        ["config", "show"],
        ["report", "--markdown", "--check"],
        ["--version"],
    ],
    ids=" ".join,
)
def test_everyday_commands_import_nothing_heavy(tmp_path: Path, words: list[str]) -> None:
    toy_run(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(words=words)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    code, modules = json.loads(done.stderr.splitlines()[-1])
    assert code in (0, 5), done.stderr
    assert sorted(set(modules) & set(HEAVY)) == []
