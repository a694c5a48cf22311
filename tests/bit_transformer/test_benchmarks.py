"""The evidence from a GPU runs from its first line to its last: who has the machine for it meets no first-run crash."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bit_transformer.launches import ROOT


@pytest.mark.slow
def test_gpu_evidence_is_tried_on_a_cpu_gone_on_with_and_never_called_a_gpus(tmp_path: Path) -> None:
    """Two cells, one a call: the second call plays what is left, a third nothing; what was not played is in the table."""
    words = ("--device", "cpu", "--out", str(tmp_path), "--cells", "streams,save")

    def call(*more: str) -> str:
        done = subprocess.run([sys.executable, "-m", "benchmarks.gpu_evidence", *words, *more], cwd=ROOT, text=True,
                              capture_output=True, timeout=250)  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    assert "no time left for save" in call("--seconds", "45")  # the limits of the two cells are 40 and 60 seconds
    assert "save: ok" in call() and "streams: ok" not in call()
    record = json.loads((tmp_path / "evidence.json").read_text())
    assert record["cells"]["streams"]["found"]["equal"] is True
    assert record["cells"]["save"]["found"]["parameters"] > 0
    assert record["cells"]["resume-zero2"] == {"state": "not played", "why": "needs a GPU"}
    assert "no figure of a GPU" in (tmp_path / "evidence.md").read_text()
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu_evidence", "--cells", "nothing", "--device", "cpu"], cwd=ROOT,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 2 and "unknown cell `nothing`" in done.stderr
