"""`accelerate launch` on a machine without a GPU: what starts two ranks starts two, what starts one in silence is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bit_transformer.errors import TopologyMismatch
from bit_transformer.training.distributed import require_all_ranks
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
ALONE = {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(("environ", "parent", "refused"), [
    (ALONE, {}, True),
    (ALONE, ALONE, False),  # exported by whoever started it: says nothing
    ({"ACCELERATE_USE_CPU": "True"}, {}, False),
    ({**ALONE, "WORLD_SIZE": "2"}, {}, False),
    ({**ALONE, "OMPI_COMM_WORLD_SIZE": "2"}, {}, False),
    ({}, {}, False),
    (ALONE, None, False),
])
def test_one_process_where_two_were_asked_for_is_known_by_what_the_launcher_left(
        environ: dict[str, str], parent: dict[str, str] | None, refused: bool) -> None:
    """An address to meet at, put there by the launcher itself, and nobody to meet."""
    if not refused:
        require_all_ranks(environ, parent)
        return
    with pytest.raises(TopologyMismatch, match="started one process although several were requested") as raised:
        require_all_ranks(environ, parent)
    assert "torchrun" in (raised.value.remedy or "") and "--multi_gpu" in (raised.value.remedy or "")


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
        assert '"accelerate_num_processes": 2' in done.stdout and '"backend": "gloo"' in done.stdout
    kept = [[(line["step"], line["loss"], line["lr"]) for line in read_lines(tmp_path / name / "launch/metrics.jsonl")]
            for name in told]
    assert len(kept[0]) == 8 and kept[0] == kept[1] == kept[2]
    samples = [read_lines(tmp_path / name / "launch/samples.jsonl") for name in told]
    assert samples[0] == samples[1] == samples[2]


@pytest.mark.slow
def test_accelerate_launch_with_cpu_is_refused_where_it_starts_fewer(tmp_path: Path) -> None:
    """`--cpu --num_processes 2` and a MULTI_CPU file: one sentence, nothing trained; one asked for: trained."""
    (tmp_path / "cpu.yaml").write_text(CONFIG.format(kind="MULTI_CPU", cpu="true"))
    for name, launcher in {"flag": (*LAUNCH, "--cpu", "--num_processes", "2"),
                           "file": ("accelerate", "launch", "--config_file", str(tmp_path / "cpu.yaml"))}.items():
        done = _train(tmp_path / name, *launcher)
        assert (
            done.returncode == 1
            and done.stderr.count("error: `accelerate launch --cpu` started one process although several") == 1
        )
        assert "hint: start with `torchrun --nproc_per_node N" in done.stderr and "step 1/" not in done.stdout
    done = _train(tmp_path / "one", *LAUNCH, "--cpu", "--num_processes", "1")
    assert done.returncode == 0 and "finished after step 8" in done.stdout, done.stderr[-2000:]
