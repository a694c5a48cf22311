"""The pure comparisons: each mismatch is one failed check with its cause, and accepted changes stay narrow."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronicle.resume.checks.memory import check_generators, check_memory
from chronicle.resume.contract import Contract, Expectation, parse_change
from chronicle.resume.lr_in_use import LrTripwire, LrWitness
from chronicle.resume.memory import Memory, ParamGroup, RankDigest, Scheduler

SAVED = Memory(
    step=30,
    groups=(ParamGroup(lr=2e-3, initial_lr=4e-3, num_params=4, num_elements=100, num_states=4),),
    optimizer_steps=(30, 30),
    optimizers=("AdamW",),
    schedulers=(Scheduler(name="LambdaLR", last_epoch=60, unit=2),),
    next_lrs=tuple((2e-3 - 1e-5 * i,) for i in range(20)),
    topology={"world_size": 2, "num_processes": 2, "accumulation": 4},
    ranks=(
        RankDigest(rank=0, rng={"torch": "a"}, weights="w", moments="m"),
        RankDigest(rank=1, rng={"torch": "b"}, weights="w", moments="m"),
    ),
)
MANIFEST = Expectation(basis="manifest", memory=SAVED)


def failures(found: Memory, expected: Expectation = MANIFEST, rank: int = 0, **options: Any) -> dict[str, str]:
    checks = check_memory(expected, found, rank=rank, **options) + check_generators(expected, found, rank=rank)
    return {check.name: check.cause for check in checks if not check.ok}


def test_equal_memory_fails_nothing_and_says_what_was_compared() -> None:
    assert failures(SAVED) == {}
    names = {check.name for check in check_memory(MANIFEST, SAVED)}
    assert names >= {
        "learning rate per group",
        "learning rates of the next steps",
        "optimizer step",
        "scheduler position",
        "weights",
        "optimizer moments",
        "world size",
        "accumulation",
    }


def test_memory_survives_its_persisted_form() -> None:
    assert Memory.from_json(SAVED.to_json()) == SAVED


@pytest.mark.parametrize(
    ("found", "name", "cause"),
    [
        (
            replace(SAVED, schedulers=(replace(SAVED.schedulers[0], last_epoch=0),)),
            "scheduler position",
            "at its beginning",
        ),
        (
            replace(SAVED, schedulers=(replace(SAVED.schedulers[0], last_epoch=120),)),
            "scheduler position",
            "factor of 2",
        ),
        (
            replace(SAVED, schedulers=(replace(SAVED.schedulers[0], last_epoch=61),)),
            "scheduler position",
            "once too often",
        ),
        (replace(SAVED, schedulers=(replace(SAVED.schedulers[0], unit=1),)), "scheduler unit", "number of processes"),
        (replace(SAVED, schedulers=()), "schedulers", "not prepared or registered"),
        (replace(SAVED, optimizer_steps=None), "optimizer step", "was not restored"),
        (replace(SAVED, optimizer_steps=(29, 30)), "optimizer step", "another step"),
        (replace(SAVED, groups=(replace(SAVED.groups[0], num_states=3),)), "parameters with state", "dropped"),
        (replace(SAVED, groups=(replace(SAVED.groups[0], lr=0.0),)), "learning rate per group", "LR is zero"),
        (replace(SAVED, groups=(*SAVED.groups, SAVED.groups[0])), "learning rate per group", "groups changed"),
        (replace(SAVED, topology={**SAVED.topology, "accumulation": 8}), "accumulation", "accept the change"),
        (replace(SAVED, step=0), "step", "start from zero"),
        (replace(SAVED, ranks=(replace(SAVED.ranks[0], weights="x"),)), "weights", "not restored"),
        (replace(SAVED, ranks=(replace(SAVED.ranks[0], rng={"torch": "b"}),)), "random generators", "of rank 1"),
    ],
)
def test_each_mismatch_is_named_with_its_cause(found: Memory, name: str, cause: str) -> None:
    assert cause in failures(found)[name]


def test_averaged_weights_loaded_as_weights_are_recognised() -> None:
    """schnetpack PR #785: the run goes on from the average, which no file check can see."""
    expected = Expectation(basis="manifest", memory=replace(SAVED, averages={"ema": "e"}))
    found = replace(SAVED, averages={"ema": "e"}, ranks=(replace(SAVED.ranks[0], weights="e"),))
    assert "averaged weights `ema`" in failures(found, expected)["weights"]


def test_a_shard_of_another_rank_is_recognised() -> None:
    sharded = replace(SAVED, ranks=(SAVED.ranks[0], replace(SAVED.ranks[1], moments="n")))
    found = replace(SAVED, ranks=(replace(SAVED.ranks[0], moments="n"),))
    cause = failures(found, Expectation(basis="manifest", memory=sharded))["optimizer moments"]
    assert cause == "this rank holds the optimizer shard of rank 1"


def test_an_accepted_world_size_covers_what_depends_on_it_and_nothing_else() -> None:
    expected = replace(MANIFEST, accepted={"world_size": "one node less"})
    smaller = replace(
        SAVED,
        schedulers=(replace(SAVED.schedulers[0], unit=1),),
        ranks=(SAVED.ranks[0],),
        topology={"world_size": 1, "num_processes": 1, "accumulation": 4},
    )
    assert failures(smaller, expected) == {}
    assert set(failures(replace(smaller, topology={**smaller.topology, "accumulation": 8}), expected)) == {
        "accumulation"
    }
    assert "weights" in failures(replace(smaller, ranks=(replace(SAVED.ranks[0], weights="x"),)), expected)


def test_acceptance_of_a_change_that_did_not_happen_hides_nothing() -> None:
    expected = replace(MANIFEST, accepted={"*": "for the sake of it"})
    found = replace(SAVED, ranks=(replace(SAVED.ranks[0], rng={"torch": "x"}, moments="x"),))
    assert set(failures(found, expected)) == {"random generators", "optimizer moments"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("world_size: one node less", ("world_size", "one node less")),
        ("accumulation: doubled", ("accumulation", "doubled")),
        ("world_size", ("world_size", "no reason given")),
        ("moved to another cluster", ("*", "moved to another cluster")),
        ("moved: to another cluster", ("moved", "to another cluster")),
        ("We moved: sorry", ("*", "We moved: sorry")),
    ],
)
def test_change_with_a_name_is_narrow_and_a_bare_reason_is_wide(text: str, expected: tuple[str, str]) -> None:
    assert parse_change(text) == expected


HALF = Contract(
    rollback="R1", checkpoint="/c/opt_step-30", lrs=(1e-3,), lr_ratio=0.5, last_epochs=(60,), optimizer_step=30
)


def halved(memory: Memory) -> Memory:
    group = replace(memory.groups[0], lr=1e-3, initial_lr=2e-3)
    rows = tuple((row[0] * 0.5,) for row in memory.next_lrs or ())
    return replace(memory, groups=(group,), next_lrs=rows)


def test_contract_asks_for_the_new_lr_in_all_coming_steps() -> None:
    expected = Expectation(basis="contract", memory=SAVED, contract=HALF)
    assert failures(halved(SAVED), expected) == {}
    cause = failures(SAVED, expected)["learning rate per group"]
    assert cause == "the LR of rollback R1 did not reach memory: the script set the old one again"
    late = replace(halved(SAVED), next_lrs=SAVED.next_lrs)  # the seed's own edit: right once, then back to the old LR
    assert set(failures(late, expected)) == {"learning rates of the next steps"}


def test_contract_over_a_manifest_that_was_rewritten_with_it_is_not_scaled_twice() -> None:
    expected = Expectation(basis="contract", memory=halved(SAVED), contract=HALF)
    assert failures(halved(SAVED), expected) == {}


def test_contract_alone_is_enough_for_a_checkpoint_without_manifest() -> None:
    expected = Expectation(basis="contract", contract=HALF)
    assert failures(halved(SAVED), expected) == {}
    assert set(failures(replace(halved(SAVED), optimizer_steps=None), expected)) == {"optimizer step"}
    assert "learning rate per group" in failures(SAVED, expected)


def test_warm_up_of_a_contract_may_start_low_but_not_high() -> None:
    warm = replace(HALF, warmup_steps=100)
    expected = Expectation(basis="contract", memory=SAVED, contract=warm, by_script=("warmup",))
    low = replace(halved(SAVED), groups=(replace(halved(SAVED).groups[0], lr=1e-5),), next_lrs=None)
    assert failures(low, expected, at_first_step=True) == {}
    assert "learning rate of the warm-up" in failures(SAVED, expected, at_first_step=True)


def test_a_warm_up_that_the_guard_carries_out_excuses_no_low_lr() -> None:
    """The guard lowers the LR inside the step alone: memory must hold what the rollback promised."""
    expected = Expectation(basis="contract", memory=SAVED, contract=replace(HALF, warmup_steps=100))
    low = replace(halved(SAVED), groups=(replace(halved(SAVED).groups[0], lr=1e-5),), next_lrs=None)
    assert failures(halved(SAVED), expected, at_first_step=True) == {}
    assert "learning rate per group" in failures(low, expected, at_first_step=True)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=30))
def test_a_schedule_that_keeps_its_forecast_never_trips(lrs: list[float]) -> None:
    rows = tuple((lr,) for lr in lrs)
    wire = LrTripwire(rows=rows, source="scheduler")
    assert [wire.feed(row) for row in rows] == [None] * len(rows)
    assert wire.done


@given(st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=30), st.data())
def test_one_step_off_the_forecast_trips_at_that_step(lrs: list[float], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(lrs) - 1))
    wire = LrTripwire(rows=tuple((lr,) for lr in lrs), source="scheduler")
    checks = [wire.feed((lr * 0.5,) if i == at else (lr,)) for i, lr in enumerate(lrs)]
    assert [check is not None for check in checks] == [i == at for i in range(len(lrs))]


def test_witness_tells_a_schedule_from_a_hand_set_lr() -> None:
    rows = tuple((0.1 * i,) for i in range(1, 8))
    witness = LrWitness().predict(rows)
    assert witness.source == "untested"
    for row in rows[:3]:
        witness = witness.see(row)
    assert witness.source == "scheduler"
    assert witness.see((99.0,)).source == "manual"


@pytest.mark.parametrize(("source", "trips"), [("scheduler", True), ("manual", False), ("untested", False)])
def test_tripwire_trips_only_where_forecasts_came_true_before_the_save(source: str, trips: bool) -> None:
    """A script that sets its LR by hand makes forecasts wrong; there a step off the forecast is no reason to refuse."""
    expected = Expectation(basis="manifest", memory=replace(SAVED, lr_source=source))
    wire = LrTripwire.after(expected, SAVED, None)
    assert wire.rows == SAVED.next_lrs
    assert (wire.feed((9.0,)) is not None) is trips


def test_tripwire_without_a_manifest_never_trips() -> None:
    wire = LrTripwire.after(Expectation(basis="none"), SAVED, [(1e-3,)])
    assert wire.feed((9.0,)) is None and wire.done


# ---- another split of the same samples -------------------------------------------------------------------------------

SPLIT = replace(
    SAVED,
    schedulers=(replace(SAVED.schedulers[0], unit=1),),
    topology={"world_size": 2, "accumulation": 4, "batch_size": 8, "global_batch": 64, "sharding": "replicated"},
)
ONE_RANK = replace(
    SPLIT,
    topology={**SPLIT.topology, "world_size": 1, "accumulation": 8},
    ranks=(RankDigest(rank=0, rng={"torch": "c"}, weights="w", moments="m"),),
)


def test_same_global_batch_on_other_ranks_is_noted() -> None:
    expected = Expectation(basis="manifest", memory=SPLIT)
    assert failures(ONE_RANK, expected) == {}
    said = {check.name for check in check_memory(expected, ONE_RANK) if check.outcome == "noted"}
    assert said == {"world size", "accumulation"}


@pytest.mark.parametrize(
    "found",
    [
        replace(ONE_RANK, topology={**ONE_RANK.topology, "global_batch": 32}),
        replace(ONE_RANK, topology={**ONE_RANK.topology, "sharding": "zero1"}),
        replace(ONE_RANK, schedulers=(replace(SPLIT.schedulers[0], unit=2),)),
        replace(ONE_RANK, next_lrs=tuple((2e-3 - 2e-5 * i,) for i in range(20))),
        replace(ONE_RANK, ranks=(RankDigest(rank=0, weights="other", moments="m"),)),
    ],
    ids=["another global batch", "sharded", "schedule at another speed", "another schedule", "other weights"],
)
def test_other_ranks_are_refused_where_more_than_the_split_differs(found: Memory) -> None:
    assert failures(found, Expectation(basis="manifest", memory=SPLIT))


UNPROVED = Contract(
    rollback="R", checkpoint="/ck", lrs=(1e-3,), lr_ratio=0.5, lr_unproved=("no scheduler was saved",), next_lrs=None
)


@pytest.mark.parametrize(
    ("used", "trips_at"),
    [
        ([1e-3 * 0.99**i for i in range(60)], None),  # a schedule of its own, from the new LR on
        ([2e-3] * 5, 1),  # the loop set the old LR
        ([1e-3] * 7 + [2e-3], 8),  # an epoch later it came back
    ],
)
def test_an_lr_that_was_accepted_without_proof_is_held(used: list[float], trips_at: int | None) -> None:
    memory = replace(SAVED, lr_source="untested", schedulers=(), next_lrs=None)
    wire = LrTripwire.after(Expectation(basis="contract", memory=memory, contract=UNPROVED), memory, [(1e-3,)] * 50)
    found = [index for index, lr in enumerate(used[:50], start=1) if wire.feed((lr,)) is not None]
    assert (found[0] if found else None) == trips_at


def test_the_old_lr_before_the_first_step_is_refused_where_the_edit_was_not_proved() -> None:
    """A script that sets its LR itself may change it by the factor two; here that would be the old LR."""
    memory = replace(SAVED, lr_source="manual", schedulers=(), next_lrs=None)
    proved = Expectation(basis="contract", memory=memory, contract=replace(UNPROVED, lr_unproved=()))
    held = Expectation(basis="contract", memory=memory, contract=UNPROVED)
    assert (proved.allowed_jump(), held.allowed_jump()) == (2.0, 2.0**0.5)


def test_lr_of_one_group_that_vanishes_is_refused() -> None:
    rows = ((0.1, 0.2),) * 3 + ((0.1, 0.0),) * 3
    assert (check := LrTripwire(rows=rows, source="scheduler").feed((0.1, 0.0))) is not None and not check.ok
    foretold = LrTripwire(rows=rows, source="scheduler")
    assert [foretold.feed(row) for row in rows] == [None] * 6
    everything = LrTripwire(rows=rows, source="scheduler").feed((0.0, 0.0))  # nothing is trained: the envelope sees it
    assert everything is None or everything.ok
