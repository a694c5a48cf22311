"""Hostile checkpoints opened by the commands: nothing runs, nothing hangs, memory stays bounded, no traceback."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.attacks import hostile_files

MAX_WALKS_A_COMMAND = 16.0  # times over a million opcodes: no file has more
MAX_MEMORY_MB = 120  # a third of it is what the runner has imported; `test_greedy` measures whole commands
DOCUMENTED = {0, 1, 3, 5}  # 2 would mean that this test typed something wrong, 4 that a transaction stopped half-way


def outcomes(folder: Path, *, quick: bool) -> tuple[list[dict[str, Any]], Path]:
    folder.mkdir()
    canary = folder / "canary"
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("run_attacks.py"), folder, *(["--quick"] if quick else [])],
        capture_output=True,
        text=True,
        env={**os.environ, "CANARY": str(canary), "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()], canary


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["quick", "all"])
@pytest.mark.timeout(900)
def test_hostile_checkpoints_are_refused_or_described(tmp_path: Path, quick: bool) -> None:
    rows, canary = outcomes(tmp_path / "hostile", quick=quick)
    assert len(rows) >= (240 if quick else 400)
    assert not canary.exists(), "an attack ran"
    for row in rows:
        label = row["label"]
        assert not row["broken"], f"{label}: {row['broken']}"
        assert "Traceback" not in row["printed"], label
        assert set(row["codes"]) <= DOCUMENTED, f"{label}: {row['codes']}"
        assert row["walks"] <= MAX_WALKS_A_COMMAND * len(row["codes"]), f"{label}: {row['walks']}"
        assert row["memory_mb"] <= MAX_MEMORY_MB, f"{label}: {row['memory_mb']} MB"
        assert "\x1b" not in row["printed"], f"{label}: escape sequences reach the terminal"


def test_the_attacks_are_real(tmp_path: Path) -> None:
    """Unpickling does create the canary: otherwise the test above would prove nothing."""
    canary = tmp_path / "canary"
    code = (
        "import sys, pickle; from tests.attacks import hostile_files as h;"
        "pickle.loads(h.HOSTILE['reduce as plain pickle']())"
    )
    environ = {**os.environ, "CANARY": str(canary), "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)
    assert canary.exists()
    with pytest.raises(Exception, match=r"."):
        pickle.loads(hostile_files.HOSTILE["unknown opcode"]())
