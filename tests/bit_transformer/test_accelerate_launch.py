"""`accelerate launch` on a machine without a GPU: what starts two ranks starts two."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bit_transformer.launches import ROOT, TINY, read_lines

LAUNCH = ("accelerate", "launch", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
TORCHRUN = ("torchrun", "--standalone", "--nproc_per_node", "2")
CONFIG = """compute_environment: LOCAL_MACHINE
distributed_type: {kind}
num_machines: 1
num_processes: 2
mixed_precision: 'no'
use_cpu: {cpu}
"""


def _train(directory: Path, *launcher: str) -> subprocess.CompletedProcess[str]:
    directory.mkdir()
    words = [str(Path(sys.executable).parent / launcher[0]), *launcher[1:], "-m", "bit_transformer.train", "--checkpoints",
             "checkpoints", *(f"--set={one}" for one in (*TINY, "total_steps=8"))]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("CHRONICLE_", "ACCELERATE_"))}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": str(directory),
                "CHRONICLE_RUN_DIR": str(directory / "run"), "CHRONICLE_LAUNCH_DIR": str(directory / "launch")}
    return subprocess.run(words, cwd=directory, env=environ, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.slow
def test_accelerate_launch_trains_on_two_cpu_ranks_as_torchrun_does(tmp_path: Path) -> None:
    """By flag and by config file: two ranks over gloo, and every loss, LR and sample that of torchrun."""
    (tmp_path / "two.yaml").write_text(CONFIG.format(kind="MULTI_GPU", cpu="false"))
    told = {name: _train(tmp_path / name, *launcher) for name, launcher in {
        "torchrun": TORCHRUN,
        "flag": (*LAUNCH, "--multi_gpu", "--num_processes", "2"),
        "file": ("accelerate", "launch", "--config_file", str(tmp_path / "two.yaml")),
    }.items()}
    for name, done in told.items():
        assert done.returncode == 0, f"{name}: {done.stderr[-3000:]}"
        assert "ranks {'launcher': 2, 'torch': 2, 'accelerate': 2}" in done.stdout
    kept = [[(line["step"], line["loss"], line["lr"]) for line in read_lines(tmp_path / name / "launch/metrics.jsonl")]
            for name in told]
    assert len(kept[0]) == 8 and kept[0] == kept[1] == kept[2]
    samples = [read_lines(tmp_path / name / "launch/samples.jsonl") for name in told]
    assert samples[0] == samples[1] == samples[2]
