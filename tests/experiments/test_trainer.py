"""The order of the data in a study: what a launch reads is a function of seed, positions and order alone."""

import numpy as np
import pytest

from chronicle.data import DataPlan, SourceSpec
from experiments.trainer import LegData, leg_ids

PLAN = DataPlan(seed=0, batch_size=10, sources=(
    SourceSpec(name="code", num_samples=700, digest="c", weight=7),
    SourceSpec(name="prose", num_samples=300, digest="p", weight=3)))
BEGIN = 20  # of 100 batches in an epoch


def read(first: int, *parts: range, seed: int = 0, order: int = 0) -> np.ndarray:
    return leg_ids(PLAN, LegData(begin=BEGIN, first=first, seed=seed, parts=parts, order=order))


def samples(ids: np.ndarray) -> set[tuple[int, int]]:
    return set(map(tuple, ids.reshape(-1, 2).tolist()))


def test_launches_of_an_arm_read_on_where_the_one_before_ended() -> None:
    whole = read(20, range(20, 60))
    parts = [read(at, range(at, at + 10)) for at in range(20, 60, 10)]
    assert np.array_equal(whole, np.concatenate(parts)) and len(samples(whole)) == 400


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_arms_read_what_the_common_checkpoint_has_not_read_in_an_order_of_their_seed(seed: int) -> None:
    start, arm = read(0, range(BEGIN)), read(20, range(20, 100), seed=seed)
    assert samples(start).isdisjoint(samples(arm)) and len(samples(arm)) == 800
    assert not np.array_equal(arm, read(20, range(20, 100), seed=seed + 1))


def test_another_order_has_the_same_samples_and_as_many_of_each_source_in_a_batch() -> None:
    plain, once, twice = (read(30, range(30, 40), order=order) for order in (0, 1, 2))
    assert samples(plain) == samples(once) == samples(twice)
    assert np.array_equal(np.sort(plain[:, :, 0]), np.sort(once[:, :, 0]))
    assert not any(np.array_equal(one, other) for one, other in ((plain, once), (plain, twice), (once, twice)))


def test_a_slice_that_is_read_again_has_another_order_each_time() -> None:
    first, second, third = np.split(read(20, *[range(20, 30)] * 3), 3)
    assert np.array_equal(first, read(20, range(20, 30)))
    assert samples(first) == samples(second) == samples(third)
    assert not np.array_equal(first, second) and not np.array_equal(second, third)
