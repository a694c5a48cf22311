"""Device utilisation without a trainer's help: asked of `nvidia-smi` (here a stand-in that prints its format)."""

import json
import sys
from statistics import mean

import pytest

from chronicle.audit.claims import ClaimVerdict, judge_claim
from chronicle.audit.evidence import read_evidence
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import LaunchStart
from chronicle.launch.devices import DeviceSampler, parse_sample, read_host_memory, read_ticks
from chronicle.metrics import MetricsWriter
from chronicle.paths import RunPaths
from chronicle.report.page_data import build_page_data
from chronicle.story import read_story
from chronicle.story.series import read_series, with_machine

TRAINER = """
import os, time
from chronicle.audit import open_evidence
for rank in (0, 1):
    evidence = open_evidence(rank=rank)
    evidence.process(world_size=2, device={"kind": "cuda", "id": f"GPU-{rank}"})
time.sleep(1.5)
"""


def test_rows_that_do_not_say_everything_are_left_out():
    text = "GPU-1, 97, 70000, 312.5, 61\nGPU-2, [N/A], 5\nno devices were found\nGPU-3, 5, 1, [N/A], 40\n"
    assert parse_sample(text) == [
        ("GPU-1", 0.97, 70000 << 20, 312.5, 61.0), ("GPU-3", 0.05, 1 << 20, None, 40.0),
    ]  # fmt: skip


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
    rows = [row for row in rows if row["kind"] == "device"]
    assert [(row["device"], row["busy_fraction"]) for row in rows] == [("GPU-0", 0.95), ("GPU-1", 0.0)]
    judged = judge_claim({"devices": "2"}, read_evidence(driver.paths, read_journal(driver.paths)))[0]
    assert judged.verdict is ClaimVerdict.CONTRADICTED
    assert judged.message.endswith("idle in more than 90% of the samples: rank 1")
    assert host_file.relative_to(driver.paths.run_dir).as_posix() in [
        seal["path"] for seal in driver.entries("launch.end")[0].data["sealed"]
    ]


def test_what_a_host_does_is_read_from_what_its_kernel_counts(tmp_path):
    (tmp_path / "stat").write_text("cpu  130 0 0 970 0 0 0 0 0 0\ncpu0 1 0 0 1 0 0 0 0 0 0\n")
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 250 kB\n")
    assert read_ticks(tmp_path) == (130, 1100)
    assert read_host_memory(tmp_path) == {"memory_bytes": 750 << 10, "memory_fraction": 0.75}
    assert read_ticks(tmp_path / "none") == (0, 0) and read_host_memory(tmp_path / "none") == {}


def test_a_host_is_sampled_each_ten_seconds_and_its_page_draws_it(tmp_path):
    """With two hosts: the mean of their cores, the sum of their disks; samples before the first step count for the start."""
    paths = RunPaths(tmp_path / "logs" / "r")
    with JournalWriter(paths) as writer:
        writer.write(LaunchStart(start_step=40), launch=1)
    with MetricsWriter(paths.metrics_path(1), clock=lambda: 1000.0) as log:
        for step in range(41, 60):
            log.write(step, {"loss": 2.0})
    step, now = [None], [960.0]
    sampler = DeviceSampler(paths.launch_dir(1), host="a", clock=lambda: now[0], step=lambda: step[0])
    for second in range(45):
        now[0], step[0] = 960.0 + second, None if second < 30 else 20 + second
        sampler.look(float(second))
    own = paths.launch_dir(1) / "evidence" / "host-a.jsonl"
    rows = [json.loads(line) for line in own.read_text().splitlines()]
    assert [row["t"] for row in rows] == [970.0, 980.0, 990.0, 1000.0] and all(row["kind"] == "host" for row in rows)
    other = [{"v": 1, "t": t, "step": 55, "host": "b", "kind": "host", "cpu_fraction": 1.0} for t in (995.0, 996.0)]
    gpu = {"v": 1, "t": 995.0, "step": 55, "host": "b", "kind": "device", "memory_bytes": 8e9}
    gpus = [gpu | {"device": d, "busy_fraction": b} for d, b in (("g0", 0.5), ("g1", 1.0))]
    (own.parent / "host-b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other + gpus) + '{"t": 12')
    story = read_story(paths, signs_of_life=False)
    (series,) = with_machine(paths, story, read_series(paths, [1]))
    assert series.channels["gpu/busy %"].steps == [60] and series.channels["gpu/busy %"].values == [75.0]
    assert series.channels["gpu/least busy %"].values == [50.0] and series.channels["gpu/memory GB"].values == [8.0]
    memory = series.channels["host/memory %"]
    assert memory.steps == [40, 60]
    assert memory.values[0] == pytest.approx(100 * mean([row["memory_fraction"] for row in rows[:2]]))
    page = build_page_data(story, [series], {})
    assert {"gpu/busy %", "host/cpu %", "host/memory GB"} <= set(page["groups"]["machine"])


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
