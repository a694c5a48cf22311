"""Each check of the catalogue: what it fails, what it passes, and that it says unknown when there is nothing to read."""

import json
from dataclasses import replace

import pytest

from chronicle.preflight import CheckVerdict, RankFacts, TrainerFacts, check_facts
from chronicle.preflight.fact_checks import FACT_CHECKS
from chronicle.preflight.facts import Baseline, declare_plan

FAIL, WARN, PASS = CheckVerdict.FAIL, CheckVerdict.WARN, CheckVerdict.PASS
UNKNOWN, SKIPPED = CheckVerdict.UNKNOWN, CheckVerdict.SKIPPED



def rank(number, **fields):
    base = {"rank": number, "host": "h", "pid": 100 + number, "device": f"GPU-{number}"}
    return RankFacts(**base | fields)


def warmup(updates, total):
    return tuple(min(1.0, (step + 1) / updates) * 1e-3 for step in range(total))


def answer(check, facts, expected=None):
    return next(one for one in check_facts(facts, expected) if one.check == check)


GOOD = TrainerFacts(
    config={"d_model": 512, "layers": 8},
    params_logical=1000,
    params_counted=1000,
    ranks=(
        rank(0, params_local=1000, first_batch_digest="a"),
        rank(1, params_local=1000, first_batch_digest="b"),
    ),
    world_sizes_seen={"launcher": 2, "torch": 2},
    wrapper="DistributedDataParallel",
    precision="bf16",
    dataset="stdlib",
    dataset_bytes=540_000_000,
    num_samples=50_000,
    pad_fraction=0.1,
    num_data_shards=8,
    num_workers=2,
    masked_fractions=(0.0, 0.1),
    planned_steps=1000,
    scheduler="OneCycleLR",
    scheduler_horizon=1000,
    learning_rates=warmup(50, 1000),
    checkpoint_bytes=10**6,
    save_seconds=5.0,
)
EXPECTED = Baseline(
    plan=declare_plan(GOOD), claimed_params=1000, claimed_devices=2, grace_seconds=90, free_bytes=10**9
)


def test_a_healthy_run_passes_every_check():
    assert [(one.check, one.verdict) for one in check_facts(GOOD, EXPECTED) if one.verdict is not PASS] == []


def test_nothing_known_is_unknown_everywhere_and_passes_nowhere():
    results = check_facts(TrainerFacts())
    assert len(results) == len(FACT_CHECKS)
    assert {one.verdict for one in results} == {UNKNOWN}


BROKEN = [
    ("PF01", FAIL, {"num_data_shards": 1}, "1 ranks get nothing"),
    ("PF01", FAIL, {"num_data_shards": 3}, "1 get nothing"),
    ("PF01", WARN, {"num_data_shards": 5}, "unevenly"),
    ("PF01", PASS, {"num_data_shards": 1, "data_resampled": True}, "2 ranks"),
    ("PF03", FAIL, {"params_counted": 500}, "exactly 1/2"),
    ("PF04", FAIL, {"world_sizes_seen": {"launcher": 2, "torch": 1}}, "disagree"),
    ("PF04", FAIL, {"ranks": (rank(0), rank(1, device="GPU-0")), "world_sizes_seen": {}}, "ranks 0, 1 all on GPU-0"),
    ("PF04", FAIL, {"ranks": (rank(0),), "world_sizes_seen": {}}, "2 devices requested, 1 in use"),
    ("PF05", FAIL, {"wrapper": "DataParallel"}, "found DataParallel"),
    ("PF14", FAIL, {"masked_fractions": (1.0, 1.0)}, "all labels are −100"),
    ("PF14", WARN, {"masked_fractions": (0.95,)}, "95%"),
    ("PF15", WARN, {"num_samples": 5}, "5 samples"),
    ("PF15", WARN, {"pad_fraction": 0.8}, "80%"),
    ("PF21", FAIL, {"checkpoint_bytes": 10**9}, "needed"),
    ("PF23", FAIL, {"save_seconds": 95.0}, "killed after 90 s"),
]


@pytest.mark.parametrize("check, verdict, changed, words", BROKEN, ids=[f"{row[0]}-{row[3][:20]}" for row in BROKEN])
def test_one_broken_fact_is_found_by_its_check(check, verdict, changed, words):
    found = answer(check, replace(GOOD, **changed), EXPECTED)
    assert found.verdict is verdict
    assert words in f"{found.message} {found.remedy}"


def test_ranks_of_one_model_replica_may_read_the_same_batch_and_others_may_not():
    same = tuple(replace(one, first_batch_digest="a") for one in GOOD.ranks)
    assert answer("PF19", replace(GOOD, ranks=same)).verdict is FAIL
    replica = tuple(replace(one, data_rank=0) for one in same)
    assert answer("PF19", replace(GOOD, ranks=replica)).verdict is PASS


def test_sharded_parts_add_up_to_the_model_with_padding():
    """679,962,626 over four ranks with FSDP: 169,990,657 each, two elements of padding."""
    whole, part = 679_962_626, 169_990_657
    ranks = tuple(rank(n, params_local=part) for n in range(4))
    facts = TrainerFacts(params_logical=whole, params_counted=whole, ranks=ranks, wrapper="FullyShardedDataParallel")
    assert answer("PF03", facts).verdict is PASS
    assert answer("PF03", replace(facts, ranks=ranks[:3])).verdict is FAIL


def test_silent_change_is_refused_and_an_accepted_one_is_said():
    smaller = replace(GOOD, params_logical=140, config={"d_model": 128, "layers": 8})
    found = answer("PF06", smaller, EXPECTED)
    assert found.verdict is FAIL
    assert found.message == "params: 1,000 → 140 (86% smaller); d_model: 512 → 128"
    accepted = answer("PF06", smaller, replace(EXPECTED, accepted_change="a small model first"))
    assert accepted.verdict is PASS and "a small model first" in accepted.message


def test_accepted_change_of_the_world_passes_every_check():
    """One rank where two were planned: the devices and the wrapper fail until the change is accepted as a whole."""
    one = TrainerFacts(ranks=(rank(0),), wrapper="BitTransformer")
    planned = Baseline(plan={"world_size": 2, "wrapper": "DistributedDataParallel"})
    assert [answer(check, one, planned).verdict for check in ("PF04", "PF05")] == [FAIL, FAIL]
    accepted = replace(planned, accepted_change="one machine is gone")
    assert FAIL not in [one.verdict for one in check_facts(one, accepted)]


def test_skipped_check_says_what_it_would_have_said():
    found = next(one for one in check_facts(replace(GOOD, num_data_shards=1), EXPECTED, skip=("PF01",)) if one.check == "PF01")
    assert found.verdict is SKIPPED and "1 ranks get nothing" in found.message


def test_facts_survive_the_journal():
    assert TrainerFacts.from_json(json.loads(json.dumps(GOOD.to_json()))) == GOOD
    former = {**json.loads(json.dumps(GOOD.to_json())), "micro_batch": 4, "memory_needed": {"weights": 9}}
    former["ranks"] = [{**rank, "memory_free": 9} for rank in former["ranks"]]
    assert TrainerFacts.from_json(former) == GOOD, "what an earlier journal holds beside them is left out"
    for nonsense in ([1], "facts", {"ranks": [5]}, {"ranks": [{}]}):
        with pytest.raises((ValueError, TypeError)):
            TrainerFacts.from_json(nonsense)
