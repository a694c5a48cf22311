"""Claims against evidence that ranks wrote through the public interface: never "false" for lack of a record."""

import json
import os

import pytest

from chronicle.audit import open_evidence
from chronicle.audit.claims import FIELDS, ClaimVerdict, judge_claim, list_unjudged, overall, read_quantity
from chronicle.audit.evidence import read_evidence
from chronicle.cli.main import run as chronicle
from chronicle.errors import UsageProblem
from chronicle.journal import JournalWriter, read_journal
from chronicle.metrics.log import MetricsWriter
from chronicle.paths import RunPaths

CLAIM = {"params": "1.21B", "devices": "4", "data": "WikiText-103"}
SUPPORTED, CONTRADICTED, NO_EVIDENCE = ClaimVerdict.SUPPORTED, ClaimVerdict.CONTRADICTED, ClaimVerdict.NO_EVIDENCE


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


def judged(paths, **fields):
    return judge_claim(fields, read_evidence(paths, read_journal(paths)))


def verdict(paths, **fields):
    (one,) = judged(paths, **fields)
    return one.verdict


def test_every_field_of_a_true_claim_is_supported_with_its_evidence(paths):
    write_launch(paths, ranks=4, counted=1_208_606_722, local=302_151_681, dataset="WikiText-103")
    found = judged(paths, **CLAIM, precision="bf16", wrapper="DDP", steps="10", ranks="4", hosts="1")
    assert {one.verdict for one in found} == {SUPPORTED}
    assert all(one.evidence for one in found)
    assert "launches/0001/evidence/rank-0.jsonl:2" in found[0].evidence


@pytest.mark.parametrize("field", FIELDS)
def test_no_evidence_is_never_contradicted(paths, field):
    """Seed 000: "no results file, so it never ran"."""
    assert verdict(paths, **{field: "7"}) is NO_EVIDENCE


def test_two_ranks_on_one_device_are_not_two_devices(paths):
    """Seed 000: `device_ids=[0]`."""
    write_launch(paths, ranks=2, device=lambda rank: {"kind": "cuda", "id": "GPU-0"})
    assert verdict(paths, devices="2") is CONTRADICTED
    assert verdict(paths, ranks="2") is SUPPORTED


def test_a_cpu_is_no_device(paths):
    write_launch(paths, ranks=2, device=lambda rank: {"kind": "cpu", "id": f"h/{rank}"})
    assert verdict(paths, devices="2") is CONTRADICTED


def test_a_device_idle_in_nearly_every_sample_does_not_count(paths):
    write_launch(paths, ranks=2)
    for rank, busy in ((0, 0.95), (1, 0.0)):
        evidence = open_evidence({"CHRONICLE_LAUNCH_DIR": str(paths.launch_dir(1)), "RANK": str(rank)})
        for step in range(1, 21):
            evidence.device(step=step, busy_fraction=busy, memory_bytes=1)
    (found,) = judged(paths, devices="2")
    assert found.verdict is CONTRADICTED
    assert "idle in more than 90% of the samples: rank 1" in found.message


def test_a_rank_without_a_device_leaves_the_count_without_evidence(paths):
    write_launch(paths, ranks=2, device=lambda rank: {"kind": "cuda", "id": "GPU-0"} if rank == 0 else {"kind": "cuda"})
    assert verdict(paths, devices="1") is NO_EVIDENCE


@pytest.mark.parametrize(
    ("said", "wanted"), [("L4", SUPPORTED), ("nvidia l4", SUPPORTED), ("H100", CONTRADICTED), ("L40", CONTRADICTED)]
)
def test_another_model_of_gpu_is_another_gpu(paths, said, wanted):
    write_launch(paths, ranks=2, device=lambda rank: {"kind": "cuda", "id": f"GPU-{rank}", "name": "NVIDIA L4"})
    assert verdict(paths, device_name=said) is wanted


@pytest.mark.parametrize(
    ("said", "wanted"),
    [("WikiText", SUPPORTED), ("wikitext-103", SUPPORTED), ("wikitext-2", CONTRADICTED), ("openwikitext", CONTRADICTED)],
)
def test_a_data_set_is_named_in_whole_words(paths, said, wanted):
    write_launch(paths, dataset="wikitext-103/train")
    assert verdict(paths, data=said) is wanted


def test_hours_are_those_of_the_supervisors_and_a_missing_one_is_unknown(paths):
    write_launch(paths)
    assert verdict(paths, hours="2") is NO_EVIDENCE
    with JournalWriter(paths) as writer:
        writer.append("launch.end", launch=1, data={"exit_code": 0, "duration_seconds": 7300.0})
    assert verdict(paths, hours="2") is SUPPORTED
    assert verdict(paths, hours="12") is CONTRADICTED


def test_one_launch_of_the_lineage_that_contradicts_is_enough(paths):
    write_launch(paths, 1, ranks=4, steps=10)
    write_launch(paths, 2, ranks=2, steps=20, start=10)
    assert read_evidence(paths, read_journal(paths)).kept == (1, 2)
    assert verdict(paths, devices="4") is CONTRADICTED
    assert verdict(paths, devices="2") is CONTRADICTED


def test_a_launch_that_was_abandoned_whole_is_not_part_of_the_claim(paths):
    write_launch(paths, 1, ranks=4, steps=10)
    write_launch(paths, 2, ranks=2, steps=20)
    assert read_evidence(paths, read_journal(paths)).kept == (2,)
    assert verdict(paths, devices="2") is SUPPORTED


def test_loss_and_volume_are_held_against_the_log_and_the_loaders(paths):
    write_launch(paths)
    assert verdict(paths, final_loss="1.0") is SUPPORTED
    assert verdict(paths, final_loss="0.5") is CONTRADICTED
    assert verdict(paths, samples="640") is SUPPORTED
    assert verdict(paths, samples="320") is CONTRADICTED
    assert verdict(paths, tokens="640") is NO_EVIDENCE


def test_torn_evidence_is_less_evidence_not_other_evidence(paths):
    write_launch(paths)
    file = paths.launch_dir(1) / "evidence" / "rank-0.jsonl"
    with open(file, "a") as lines:
        lines.write(json.dumps({"v": 99, "kind": "model", "rank": 0, "counted": 1}) + "\n{\"v\":1,\"kind\":\"mod")
    assert verdict(paths, params="771M") is SUPPORTED


# --- Numbers and the sentence


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("1208606722", 1_208_606_722, 1_208_606_723),
        ("1,208,606,722", 1_208_606_722, 1_208_606_721),
        ("1.21B", 1_208_606_722, 1_216_000_000),
        ("680M", 679_962_626, 681_000_000),
        ("2.35", 2.354, 2.36),
        ("1e3", 1000, 1600),
    ],
)
def test_a_number_stands_for_what_rounds_to_it(text, inside, outside):
    quantity = read_quantity(text)
    assert quantity.admits(inside) and not quantity.admits(outside)


def test_what_is_no_number_is_a_usage_error(paths):
    with pytest.raises(UsageProblem, match="`many` is not a number"):
        judged(paths, devices="many")


def test_numbers_of_the_sentence_that_no_field_states_are_not_judged():
    sentence = "We trained 1.21B parameters on 4 H100 for 3,000 steps on WikiText-103 (bf16, 2x faster)"
    assert list_unjudged(sentence, {"params": "1208606722", "data": "wikitext-103"}) == ("4", "3,000", "2")
    assert list_unjudged(sentence, {"params": "1.21B", "devices": "4", "steps": "3000", "data": "WikiText-103"}) == ("2",)


def test_a_sentence_with_a_number_that_was_not_judged_is_not_supported(paths):
    write_launch(paths)
    found = judged(paths, samples="640")
    assert overall(found, ()) is SUPPORTED
    assert overall(found, ("1.21B",)) is NO_EVIDENCE


def test_the_command_records_the_sentence_the_fields_and_the_verdicts(paths, capsys, monkeypatch, tmp_path):
    write_launch(paths)
    monkeypatch.chdir(tmp_path)
    words = ["claim", "--logs", str(tmp_path), "--run", "demo", "--json"]
    assert chronicle([*words, "--samples", "640", "640 samples in 3 days"]) == 5
    told = json.loads(capsys.readouterr().out)
    assert (told["verdict"], told["not_judged"], told["fields"]) == ("NO EVIDENCE", ["3"], {"samples": "640"})
    (entry,) = read_journal(paths).of_kind("claim")
    assert entry.data["text"] == "640 samples in 3 days"
    assert chronicle([*words, "--samples", "640", "640 samples"]) == 0
    assert chronicle([*words, "640 samples"]) == 2


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


def test_resumes_exactly_is_supported_until_code_packages_or_ranks_change(paths):
    """What was rehearsed says nothing of another script."""
    code = {"git_commit": "c", "git_dirty_digest": None, "env_digest": "e"}
    write_launch(paths, ranks=2)
    assert verdict(paths, resumes="exactly") is NO_EVIDENCE, "never rehearsed"
    told = {"verdict": "resumes exactly", "command": ["train", "--out={out}"], "signal": "SIGKILL", "ranks": 2, **code}
    with JournalWriter(paths) as writer:
        writer.append("rehearsal", data=told)
    assert verdict(paths, resumes="exactly") is NO_EVIDENCE, "the launch was started by another command"
    changes = ((2, {}, SUPPORTED), (3, {"git_commit": "d"}, NO_EVIDENCE), (4, {"env_digest": "f"}, NO_EVIDENCE))
    for number, changed, expected in changes:
        other = RunPaths(paths.run_dir.parent / f"run-{number}")
        with JournalWriter(other) as writer:
            writer.append("rehearsal", data=told)
            writer.append("launch.start", launch=1, data={"argv": ["train", "--out=here"], **code, **changed})
        for rank in range(2):
            environ = {"CHRONICLE_LAUNCH_DIR": str(other.launch_dir(1)), "RANK": str(rank)}
            open_evidence(environ).process(world_size=2, device={}, wrapper="", precision="")
        assert verdict(other, resumes="exactly") is expected, changed
        assert verdict(other, resumes="differently") is (CONTRADICTED if expected is SUPPORTED else NO_EVIDENCE)
