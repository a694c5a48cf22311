"""Device utilisation without a trainer's help: asked of `nvidia-smi` (here a stand-in that prints its format)."""

import json
import sys

from chronicle.audit.claims import ClaimVerdict, judge_claim
from chronicle.audit.evidence import read_evidence
from chronicle.journal import read_journal
from chronicle.launch.live_metrics import parse_sample

TRAINER = """
import os, time
from chronicle.audit import open_evidence
for rank in (0, 1):
    evidence = open_evidence(rank=rank)
    evidence.process(world_size=2, device={"kind": "cuda", "id": f"GPU-{rank}"})
time.sleep(1.5)
"""


def test_rows_that_do_not_say_everything_are_left_out():
    text = "GPU-1, 97, 70000\nGPU-2, [N/A], 5\nno devices were found\n"
    assert parse_sample(text) == [("GPU-1", 0.97, 70000 << 20)]


def test_idle_device_is_sampled_and_does_not_count_as_used(driver):
    """Issue 6: a claimed device that is idle in more than 90 % of the samples is CONTRADICTED."""
    fake = driver.directory / "nvidia-smi"
    fake.write_text("#!/bin/sh\nprintf 'GPU-0, 95, 40000\\nGPU-1, 0, 300\\n'\n")
    fake.chmod(0o755)
    environ = {"PATH": f"{driver.directory}:{driver.environ['PATH']}"}
    driver.start([sys.executable, "-c", TRAINER], "--skip", "PF08", environ=environ)
    assert driver.wait() == 0
    [host_file] = driver.paths.launch_dir(1).glob("evidence/host-*.jsonl")
    rows = [json.loads(line) for line in host_file.read_text().splitlines()]
    assert [(row["device"], row["busy_fraction"]) for row in rows] == [("GPU-0", 0.95), ("GPU-1", 0.0)]
    judged = judge_claim("on 2 GPUs", read_evidence(driver.paths, read_journal(driver.paths)))[0]
    assert judged.verdict is ClaimVerdict.CONTRADICTED
    assert judged.message.endswith("idle in more than 90% of the samples: rank 1")
    assert host_file.relative_to(driver.paths.run_dir).as_posix() in [
        seal["path"] for seal in driver.entries("launch.end")[0].data["sealed"]
    ]


def test_foreign_memory_on_a_gpu_refuses_the_launch(driver):
    """PF08, seed 001: later runs ran out of memory because orphans held it."""
    fake = driver.directory / "nvidia-smi"
    fake.write_text("#!/bin/sh\nprintf '0, GPU-a, 23000\\n1, GPU-b, 4\\n'\n")
    fake.chmod(0o755)
    environ = {"PATH": f"{driver.directory}:{driver.environ['PATH']}"}
    driver.start([sys.executable, "-c", ""], environ=environ)
    assert driver.wait() == 125
    assert "memory in use by others: GPU-a: 23000 MiB" in driver.out.read_text()
    driver.start([sys.executable, "-c", ""], environ=environ | {"CUDA_VISIBLE_DEVICES": "1"})
    assert driver.wait() == 0
