"""Claims against evidence that ranks wrote through the public interface: never "false" for lack of a record."""

import json
import os

import pytest

from chronicle.audit import open_evidence
from chronicle.audit.claims import ClaimVerdict, judge_claim
from chronicle.audit.evidence import read_evidence
from chronicle.journal import JournalWriter, read_journal
from chronicle.metrics.log import MetricsWriter
from chronicle.paths import RunPaths

CLAIM = "trained 1.21B on 4 GPUs on WikiText-103"


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "demo")


def write_launch(
    paths, number=1, *, ranks=2, counted=771_176_450, local=None, device=None, dataset="five texts", steps=10, start=0
):
    """What a launch of `ranks` ranks leaves, written by the interface trainers use."""
    for rank in range(ranks):
        environ = {"CHRONICLE_LAUNCH_DIR": str(paths.launch_dir(number)), "RANK": str(rank)}
        evidence = open_evidence(environ)
        shown = {"kind": "cuda", "id": f"GPU-{rank}"} if device is None else device(rank)
        evidence.process(world_size=ranks, device=shown, wrapper="DistributedDataParallel", precision="bf16")
        evidence.model(logical=counted, counted=counted, local=counted if local is None else local)
        evidence.data(step=steps, samples=32 * steps, bytes=100 * steps, dataset=dataset)
        evidence.end(step=steps)
    with JournalWriter(paths) as writer:
        writer.append("launch.start", launch=number, data={"host": "h"})
        writer.append("launch.end", launch=number, data={"exit_code": 0, "last_step": steps, "start_step": start})
    with MetricsWriter(paths.metrics_path(number)) as log:
        for step in range(start + 1, steps + 1):
            log.write(step, {"loss": 2.0 - 0.1 * step})


def verdicts(paths, sentence):
    judged = judge_claim(sentence, read_evidence(paths, read_journal(paths)))
    return {one.statement.text: one.verdict for one in judged}


def test_every_part_of_a_true_sentence_is_supported_with_its_evidence(paths):
    device = lambda rank: {"kind": "cuda", "id": f"GPU-{rank}"}  # noqa: E731
    write_launch(paths, ranks=4, counted=1_208_606_722, local=302_151_681, device=device, dataset="WikiText-103")
    judged = judge_claim(CLAIM + " in bf16 with DDP for 10 steps", read_evidence(paths, read_journal(paths)))
    assert {one.verdict for one in judged} == {ClaimVerdict.SUPPORTED}
    assert all(one.evidence for one in judged)
    assert "launches/0001/evidence/rank-0.jsonl:2" in judged[0].evidence


def test_no_evidence_is_unsupported_and_never_contradicted(paths):
    """Seed 000: "no results file, so it never ran"."""
    assert set(verdicts(paths, CLAIM).values()) == {ClaimVerdict.UNSUPPORTED}


def test_a_target_is_never_supported_by_a_run_that_reached_it(paths):
    write_launch(paths, counted=1_208_606_722)
    assert verdicts(paths, "Target: 1,208,606,722 parameters") == {
        "Target: 1,208,606,722 parameters": ClaimVerdict.UNSUPPORTED
    }


def test_two_ranks_on_one_device_are_not_two_devices(paths):
    """Seed 000: `device_ids=[0]`."""
    write_launch(paths, ranks=2, device=lambda rank: {"kind": "cuda", "id": "GPU-0"})
    assert verdicts(paths, "on 2 GPUs")["2 GPUs"] is ClaimVerdict.CONTRADICTED
    assert verdicts(paths, "on 2 ranks")["2 ranks"] is ClaimVerdict.SUPPORTED


def test_cpu_ranks_are_no_gpus(paths):
    write_launch(paths, ranks=2, device=lambda rank: {"kind": "cpu", "id": f"h/{rank}"})
    assert verdicts(paths, "on 2 GPUs")["2 GPUs"] is ClaimVerdict.CONTRADICTED
    assert verdicts(paths, "on 2 devices")["2 devices"] is ClaimVerdict.SUPPORTED


def test_a_device_idle_in_nearly_every_sample_does_not_count(paths):
    write_launch(paths, ranks=2)
    for rank, busy in ((0, 0.95), (1, 0.0)):
        evidence = open_evidence({"CHRONICLE_LAUNCH_DIR": str(paths.launch_dir(1)), "RANK": str(rank)})
        for step in range(1, 21):
            evidence.device(step=step, busy_fraction=busy, memory_bytes=1)
    judged = judge_claim("on 2 GPUs", read_evidence(paths, read_journal(paths)))
    assert judged[0].verdict is ClaimVerdict.CONTRADICTED
    assert "idle in more than 90% of the samples: rank 1" in judged[0].message


def test_another_model_of_gpu_is_another_gpu(paths):
    write_launch(paths, ranks=2, device=lambda rank: {"kind": "cuda", "id": f"GPU-{rank}", "name": "NVIDIA L4"})
    assert verdicts(paths, "on 2 H100")["2 H100"] is ClaimVerdict.CONTRADICTED
    assert verdicts(paths, "on 2x NVIDIA L4")["2x NVIDIA L4"] is ClaimVerdict.SUPPORTED


def test_hours_are_those_of_the_supervisors_and_a_missing_one_is_unknown(paths):
    write_launch(paths)
    assert verdicts(paths, "2 hours") == {"2 hours": ClaimVerdict.UNSUPPORTED}
    with JournalWriter(paths) as writer:
        writer.append("launch.end", launch=1, data={"exit_code": 0, "duration_seconds": 7300.0})
    assert verdicts(paths, "2 hours") == {"2 hours": ClaimVerdict.SUPPORTED}
    assert verdicts(paths, "12 hours") == {"12 hours": ClaimVerdict.CONTRADICTED}


def test_one_launch_of_the_lineage_that_contradicts_is_enough(paths):
    write_launch(paths, 1, ranks=4, steps=10)
    write_launch(paths, 2, ranks=2, steps=20, start=10)
    assert read_evidence(paths, read_journal(paths)).kept == (1, 2)
    assert verdicts(paths, "on 4 GPUs")["4 GPUs"] is ClaimVerdict.CONTRADICTED
    assert verdicts(paths, "on 2 GPUs")["2 GPUs"] is ClaimVerdict.CONTRADICTED


def test_a_launch_that_was_abandoned_whole_is_not_part_of_the_sentence(paths):
    write_launch(paths, 1, ranks=4, steps=10)
    write_launch(paths, 2, ranks=2, steps=20)
    assert read_evidence(paths, read_journal(paths)).kept == (2,)
    assert verdicts(paths, "on 2 GPUs")["2 GPUs"] is ClaimVerdict.SUPPORTED


def test_loss_and_volume_are_held_against_the_log_and_the_loaders(paths):
    write_launch(paths)
    found = verdicts(paths, "loss of 1.0 after 640 samples")
    assert found == {"loss of 1.0": ClaimVerdict.SUPPORTED, "640 samples": ClaimVerdict.SUPPORTED}
    assert verdicts(paths, "loss of 0.5")["loss of 0.5"] is ClaimVerdict.CONTRADICTED


def test_torn_evidence_is_less_evidence_not_other_evidence(paths):
    write_launch(paths)
    file = paths.launch_dir(1) / "evidence" / "rank-0.jsonl"
    with open(file, "a") as lines:
        lines.write(json.dumps({"v": 99, "kind": "model", "rank": 0, "counted": 1}) + "\n{\"v\":1,\"kind\":\"mod")
    assert verdicts(paths, "771M parameters") == {"771M parameters": ClaimVerdict.SUPPORTED}


def test_evidence_without_a_launch_directory_writes_nothing_and_does_not_fail(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_evidence({}).process(world_size=1, device={"kind": "cpu"})
    assert os.listdir(tmp_path) == []


def test_evidence_on_a_full_disk_is_said_once_and_does_not_raise(tmp_path, capsys):
    evidence = open_evidence({"CHRONICLE_LAUNCH_DIR": str(tmp_path)})
    (tmp_path / "evidence").mkdir()
    os.symlink("/dev/full", tmp_path / "evidence" / "rank-0.jsonl")
    evidence.end(step=1)
    evidence.end(step=2)
    assert capsys.readouterr().err.count("evidence of rank 0 is no longer written") == 1
