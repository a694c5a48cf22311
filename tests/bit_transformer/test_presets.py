"""The presets as a person starts them: they say what they do before it takes long, and the CPU preset ends with its exports.

All of them small, in one process, one after the other.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from tests.bit_transformer.launches import ROOT

SMALL = ("d_model=32", "num_heads=4", "num_layers=2", "d_ff=64", "window_bytes=16", "chunk=32", "overlap=16",
         "batch_size=12", "warmup_steps=1", "total_steps=4", "eval_windows=8", "eval_every=4", "checkpoint_every=4")
STARTS = {"baseline": ("summary=false",), "cpu-int8": ("qat_from_step=2",), "scaleup": ("min_bytes_per_parameter=1e6",),
          "demo": ("raise_step=none", "decay_steps=1", "model.vocab=256", "norm=pre", "summary=false")}
WORKER = """
import json, os, sys
from accelerate.state import AcceleratorState, GradientState
from bit_transformer import train
for name, arguments in json.loads(sys.argv[1]).items():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ["CHRONICLE_RUN_DIR"] = os.path.join(os.getcwd(), "logs", name)
    os.environ["CHRONICLE_LAUNCH_DIR"] = os.path.join(os.getcwd(), "logs", name, "launches", "0001")
    for stream in (sys.stdout, sys.stderr):
        print(f"=== {name}", file=stream, flush=True)
    print(f"code {train.main(arguments)}", file=sys.stderr, flush=True)
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every preset once."""
    root = tmp_path_factory.mktemp("presets")
    starts = {name: ["--recipe", name, "--checkpoints", str(root / name),
                     *(f"--set={setting}" for setting in (*SMALL, *settings))] for name, settings in STARTS.items()}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    done = subprocess.run([sys.executable, "-c", WORKER, json.dumps(starts)], cwd=root, capture_output=True, text=True,
                          env={**environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (root / "stdout").write_text(done.stdout)
    (root / "stderr").write_text(done.stderr)
    return root


def _part(root: Path, stream: str, name: str) -> list[str]:
    return (root / stream).read_text().partition(f"=== {name}\n")[2].partition("=== ")[0].splitlines()


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("name", ["baseline", "cpu-int8", "demo"])
def test_preset_says_data_model_and_plan_first_and_trains(started: Path, name: str) -> None:
    """Three lines before the start's facts, the first step at once, and code 0 at the end; `demo` here on bytes."""
    lines = _part(started, "stdout", name)
    kinds = [line.split(":")[0].split(" ")[0] for line in lines]
    assert kinds[:4] == ["data", "model", "plan", "start"]
    assert any(line.startswith("step 1/4 ") for line in lines) and lines[-1] == "finished after step 4"
    assert _part(started, "stderr", name)[-1] == "code 0", _part(started, "stderr", name)


@pytest.mark.slow
@pytest.mark.sample
def test_scaleup_refuses_without_evidence_in_one_sentence(started: Path) -> None:
    """It asks for bytes of text for each parameter; here for a million of them, and nothing is trained."""
    errors = [line for line in _part(started, "stderr", "scaleup") if line.startswith(("error", "Traceback"))]
    assert len(errors) == 1 and "bytes of training text, expected" in errors[0] and "(1e+06 a parameter)" in errors[0]
    assert _part(started, "stderr", "scaleup")[-1] == "code 1" and not (started / "scaleup").exists()


@pytest.mark.slow
@pytest.mark.sample
def test_cpu_preset_trains_for_four_bits_and_exports_to_eight(started: Path) -> None:
    """From step 2 in four bits, under bf16 and reversible blocks; int8 beside float32, measured and on disk."""
    entries = [entry for entry in read_journal(RunPaths(started / "logs/cpu-int8")).entries if entry.kind == "export"]
    rows = {row["name"]: row for row in entries[0].data["rows"]}
    assert list(rows) == ["float32", "int8"] and rows["int8"]["bytes"] < rows["float32"]["bytes"]
    assert rows["int8"]["bpb"] == pytest.approx(rows["float32"]["bpb"], rel=0.02)
    assert {path.name for path in (started / "logs/cpu-int8").rglob("*.safetensors")} == {"int8.safetensors"}
