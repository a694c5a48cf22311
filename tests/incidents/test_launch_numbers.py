"""Seeds 000 and 001 and the playbook 002: numbers that were believed, each refused or contradicted by what can be read."""

import math

import pytest
import torch

from chronicle.audit.claims import ClaimVerdict as Claimed
from chronicle.audit.claims import judge_claim
from chronicle.audit.evidence import LaunchEvidence, Observation, RunEvidence
from chronicle.preflight import CheckVerdict, RankFacts, TrainerFacts, check_facts
from chronicle.preflight.facts import Baseline


def answer(check, facts, expected=None):
    return next(one for one in check_facts(facts, expected) if one.check == check)


def ranks(count, **fields):
    return tuple(RankFacts(rank=n, host="h", pid=n, device=f"GPU-{n}", **fields) for n in range(count))


def evidence_of(counted, local, world_size):
    """Ranks that recorded their model and themselves."""
    observations = []
    for rank in range(world_size):
        model = {"logical": counted, "counted": counted, "local": local}
        observations.append(Observation(ref=f"rank-{rank}:1", rank=rank, kind="model", fields=model))
        device = {"device": {"kind": "cuda", "id": f"GPU-{rank}"}, "world_size": world_size}
        observations.append(Observation(ref=f"rank-{rank}:2", rank=rank, kind="process", fields=device))
    launch = LaunchEvidence(launch=1, observations=tuple(observations))
    return RunEvidence(run="demo", launches=(launch,))


def formula(d, layers, ff):
    """Closed count of the seeds' model: embedding and head, then per layer attention, feed-forward and two norms."""
    return 4 * d + 2 + layers * (4 * d * d + 9 * d + ff * (2 * d + 1))


def test_two_data_shards_for_sixteen_readers_are_refused_with_the_way_out():
    """Seed 001: "4 workers per GPU × 4 GPUs = 16 workers", `num_shards=2`, a warning at 07:16:02 and a hung run."""
    found = answer("PF01", TrainerFacts(num_data_shards=2, num_workers=4, ranks=ranks(4)))
    assert found.verdict is CheckVerdict.FAIL
    assert found.message.startswith("2 data shards for 4 ranks × 4 workers = 16 readers")
    assert found.remedy == "use ≤ 0 workers a rank, or reshard to ≥ 16"


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves its tar files to the collector
def test_two_shards_really_starve_a_rank_in_silence(tmp_path, monkeypatch):
    """The loader's own behaviour behind PF01: ranks 2 and 3 of 4 read nothing and nobody says so."""
    wds = pytest.importorskip("webdataset")
    for number in range(2):
        with wds.TarWriter(str(tmp_path / f"{number}.tar")) as tar:
            tar.write({"__key__": f"{number}", "txt": b"text"})
    monkeypatch.setenv("WORLD_SIZE", "4")
    read = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        urls = str(tmp_path / "{0..1}.tar")
        data = wds.WebDataset(urls, nodesplitter=wds.split_by_node, shardshuffle=False, empty_check=False)
        read.append(sum(1 for _ in data))
    assert read == [1, 1, 0, 0]


def test_771_million_is_not_one_billion():
    """Seed 000: "Working 1B Parameter Model", 771,176,450 counted."""
    counted = formula(1792, 20, 7168)
    assert counted == 771_176_450
    (judged,) = judge_claim({"params": "1.0B"}, evidence_of(counted, counted, 1))
    assert judged.verdict is Claimed.CONTRADICTED and "(-22.9%)" in judged.message
    found = answer("PF02", TrainerFacts(params_counted=counted), Baseline(claimed_params=1e9))
    assert (found.verdict, found.message) == (CheckVerdict.FAIL, "claim 1,000,000,000, counted 771,176,450 (-22.9%)")


def test_four_gpus_that_were_one_are_contradicted():
    """Seed 000: "Using 4 GPUs with DataParallel", `device_ids=[0]`."""
    judged = judge_claim({"devices": "4"}, evidence_of(771_176_450, 771_176_450, 1))
    assert judged[0].verdict is Claimed.CONTRADICTED
    assert "1 ranks on 1 distinct devices" in judged[0].message


def test_one_ranks_part_is_not_a_model_that_was_scaled_down():
    """Seed 001: "1.21B → 680M → 170M". 169,990,657 = ceil(679,962,626 / 4), one rank's part of the 680M model."""
    whole = formula(1536, 24, 6144)
    part = math.ceil(whole / 4)
    assert (whole, part) == (679_962_626, 169_990_657)
    evidence = evidence_of(whole, part, 4)
    judged = judge_claim({"params": "169,990,657"}, evidence)[0]
    assert judged.verdict is Claimed.CONTRADICTED
    assert "1/4 of it: the part of one rank after sharding" in judged.message
    assert judge_claim({"params": "680M"}, evidence)[0].verdict is Claimed.SUPPORTED
    taken_after_wrapping = TrainerFacts(params_logical=whole, params_counted=part, ranks=ranks(4))
    found = answer("PF03", taken_after_wrapping)
    assert found.verdict is CheckVerdict.FAIL
    assert "exactly 1/4, a count taken on one rank after sharding" in found.message


def test_proven_by_target_lines_is_not_supported():
    """Seed 001: "1.21B PROVEN TO WORK", and the only evidence is a line `Target: …`: no rank counted anything."""
    evidence = evidence_of(None, 302_151_681, 4)
    (judged,) = judge_claim({"params": "1,208,606,722"}, evidence)
    assert judged.verdict is Claimed.NO_EVIDENCE


def test_onecycle_horizon_that_forgot_the_accumulation_never_finishes():
    """Seed 002 tasks 1 and 4: total = epochs × batches, stepped once every `accum_steps` batches."""
    accumulation, batches = 2, 400
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=batches)
    updates = batches // accumulation
    lrs = []
    for _ in range(updates):
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    facts = TrainerFacts(
        planned_steps=updates, scheduler="OneCycleLR", scheduler_horizon=scheduler.total_steps,
        learning_rates=tuple(lrs), accumulation=accumulation,
    )  # fmt: skip
    found = answer("PF11", facts)
    assert found.verdict is CheckVerdict.FAIL
    assert "OneCycleLR horizon 400 but 200 scheduler steps in 200 updates: LR ends at 8" in found.message
    assert "accumulation 2 was not divided out" in found.message


def test_all_labels_masked_is_a_loss_of_zero():
    """Seed 004: "All labels in your dataset are -100. Training losses will be all 0"."""
    labels = torch.full((4, 16), -100)
    masked = tuple(float((row == -100).float().mean()) for row in labels)
    found = answer("PF14", TrainerFacts(masked_fractions=masked))
    assert (found.verdict, found.message) == (CheckVerdict.FAIL, "all labels are −100: loss will be 0")


def test_a_save_longer_than_the_launchers_grace_is_refused_before_it_is_cut_in_half():
    """torchrun sends KILL 30 s after a signal (measured 29.8 s): a save of 47 s would be left half written."""
    found = answer("PF23", TrainerFacts(save_seconds=47.0), Baseline(grace_seconds=30.0))
    assert (found.verdict, found.remedy) == (CheckVerdict.FAIL, "chronicle run --grace 94")
