"""Slices partition the shards, arms share an order until their treatment, stock orders are webdataset's."""

import random
import shutil
import subprocess
from collections.abc import Sequence

import numpy as np
import pytest

from experiments.definition import Study, find_study
from experiments.design import legs_of
from experiments.errors import NoData
from experiments.order import (
    DataShape,
    cut_slice,
    leg_order,
    shuffle_through_buffer,
    slice_samples,
    start_order,
)


@pytest.fixture(scope="module")
def study() -> Study:
    return find_study("restart-impact")


@pytest.fixture(scope="module")
def shape(study: Study) -> DataShape:
    return DataShape(sources=study.sources, num_windows=(40_000, 9_000), profile=study.profile("ci"), num_slices=4)


def whole_order(study: Study, shape: DataShape, name: str, seed: int = 0) -> np.ndarray:
    """The batches of an arm's lineage."""
    arm = study.arm(name)
    rows = {}
    for leg in legs_of(arm, shape.profile):
        for update, batch in zip(range(leg.first, leg.last), leg_order(shape, arm, leg, seed), strict=True):
            rows[update] = batch
    return np.stack([rows[update] for update in range(len(rows))])


def samples(batches: np.ndarray) -> list[tuple[int, int]]:
    return [tuple(pair) for pair in batches.reshape(-1, 2).tolist()]


def cut_like_sed(lines: Sequence[int], first: int, more: int) -> Sequence[int]:
    """The output of `sed -n 'FIRST,+MOREp'`: line FIRST (from 1) and the next MORE lines, fewer at the end."""
    return lines[first - 1 : first + more]


def test_the_seeds_sed_takes_3841_lines_and_overlaps_by_one() -> None:
    """`sed -n '1,+3840p'` and `sed -n '3841,+3840p'` share line 3841; ours take 3,840 and share none."""
    lines = list(range(1, 15_361))
    first, second = cut_like_sed(lines, 1, 3840), cut_like_sed(lines, 3841, 3840)
    assert (len(first), len(second), set(first) & set(second)) == (3841, 3841, {3841})
    exact = [cut_slice(lines, number, 3840) for number in (1, 2, 3, 4)]
    assert [len(part) for part in exact] == [3840] * 4
    assert [line for part in exact for line in part] == lines


@pytest.mark.skipif(shutil.which("sed") is None, reason="needs GNU sed")
def test_the_real_sed_does_the_same(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "cm4-merged.random.txt"
    path.write_text("".join(f"{line}\n" for line in range(1, 15_361)))
    printed = subprocess.run(["sed", "-n", "3841,+3840p", str(path)], capture_output=True, text=True, check=True).stdout
    assert [int(line) for line in printed.split()] == list(cut_like_sed(range(1, 15_361), 3841, 3840))


def test_a_slice_beyond_the_list_is_no_data() -> None:
    with pytest.raises(NoData, match="lines 11521 to 15360, the shard list has 15000"):
        cut_slice(range(15_000), 4, 3840)


def test_slices_partition_the_pool_and_avoid_the_start(shape: DataShape) -> None:
    for source in (0, 1):
        parts = [set(slice_samples(shape, source, 0, logical).ravel().tolist()) for logical in (1, 2, 3, 4, 5)]
        start, pool = shape.pool(source)
        assert sum(map(len, parts)) == len(set().union(*parts))
        assert [len(part) for part in parts[:4]] == [shape.per_slice(source)] * 4
        assert set().union(*parts) <= set(pool.ravel().tolist())
        assert not set().union(*parts) & set(start.tolist())


def test_a_shard_is_neighbouring_text_and_the_start_is_shuffled(shape: DataShape) -> None:
    """Were samples dealt to shards at random, a stock order could not differ from a full shuffle, whatever it does."""
    rows = slice_samples(shape, 0, 0, 1)
    assert np.array_equal(rows - rows[:, :1], np.tile(np.arange(shape.profile.shard_samples), (len(rows), 1)))
    assert len(set(rows[:, 0].tolist())) == len(rows)
    assert (np.diff(rows[:, 0]) != shape.profile.shard_samples).any()
    first = [window for source, window in samples(start_order(shape)) if source == 0]
    assert len(set(first)) == len(first)
    assert np.mean(np.diff(first) == 1) < 0.05


def test_after_a_stock_restart_the_first_batches_come_from_few_shards(study: Study) -> None:
    """The cold buffer: fewer shards in the first batches of a slice than the full shuffle has there."""
    shape = DataShape(sources=study.sources, num_windows=(240_000, 14_000), profile=study.profile("cpu"), num_slices=4)

    def shards_in(name: str, first: int) -> int:
        batches = whole_order(study, shape, name)[first : first + 3]
        return len({window // 40 for source, window in samples(batches) if source == 0})

    assert shards_in("B", 100) <= 5 < 15 <= shards_in("A0", 100)


def test_the_repeated_slice_rotates_over_seeds(shape: DataShape) -> None:
    """Latin square: over four seeds each physical slice is once logical slice 1; the next four get another list."""
    firsts = [frozenset(slice_samples(shape, 0, seed, 1).ravel().tolist()) for seed in range(4)]
    assert len(set(firsts)) == 4
    assert firsts[1] == frozenset(slice_samples(shape, 0, 0, 2).ravel().tolist())
    assert frozenset(slice_samples(shape, 0, 4, 1).ravel().tolist()) not in firsts


def test_a0_reads_every_sample_of_its_slices_once(study: Study, shape: DataShape) -> None:
    seen = samples(whole_order(study, shape, "A0"))
    wanted = {(s, w) for s in (0, 1) for logical in (1, 2, 3, 4) for w in slice_samples(shape, s, 0, logical).ravel().tolist()}
    assert len(seen) == len(set(seen)) == 4 * 15 * 16
    assert set(seen) == wanted


def test_merged_and_reshuffled_arms_read_the_same_samples_in_another_order(study: Study, shape: DataShape) -> None:
    reference = whole_order(study, shape, "A0")
    for name in ("A", "B"):
        other = whole_order(study, shape, name)
        assert sorted(samples(other)) == sorted(samples(reference))
        assert not np.array_equal(other, reference)


def test_repeated_slices_are_read_four_times_each(study: Study, shape: DataShape) -> None:
    for name in ("C", "C0"):
        seen = samples(whole_order(study, shape, name))
        assert {seen.count(one) for one in set(seen)} == {4}
    passes = whole_order(study, shape, "C0").reshape(4, -1, 2)
    assert not np.array_equal(passes[0], passes[1])


@pytest.mark.parametrize("name", ["A-prime", "B-opt", "B-lr"])
def test_arms_that_lose_no_order_read_identical_batches(study: Study, shape: DataShape, name: str) -> None:
    assert np.array_equal(whole_order(study, shape, name), whole_order(study, shape, "A0"))


@pytest.mark.parametrize("name", ["B", "C", "C0", "B-ratio"])
def test_arms_share_the_first_slice(study: Study, shape: DataShape, name: str) -> None:
    """Until the treatment the data are the same: the accidental A/A test of the seed, made to hold."""
    other, reference = whole_order(study, shape, name), whole_order(study, shape, "A0")
    assert np.array_equal(other[:15], reference[:15])
    assert not np.array_equal(other[15:], reference[15:])


def test_a_rollback_skips_exactly_the_asked_batches(study: Study, shape: DataShape) -> None:
    """Back from 2½ slices by one, half a slice skipped: batches 22 … 29 of A0 are never read, nothing is read twice."""
    reference, seen = whole_order(study, shape, "A0"), whole_order(study, shape, "B-skip")
    leg = legs_of(study.arm("B-skip"), shape.profile)[1]
    assert (leg.first, leg.data_offset) == (23, 8)
    assert np.array_equal(seen[:23], reference[:23])
    assert np.array_equal(seen[23:52], reference[31:])
    assert len(set(samples(seen))) == len(samples(seen))


def test_the_wrong_ratio_lasts_as_long_as_asked(study: Study, shape: DataShape) -> None:
    batches = whole_order(study, shape, "B-ratio")
    code = (batches[:, :, 0] == 0).mean(axis=1)
    dips = [slice(first, first + 8) for first in (15, 30, 45)]
    assert [code[dip].mean() for dip in dips] == pytest.approx([0.4] * 3, abs=0.01)
    rest = np.delete(code, np.r_[15:23, 30:38, 45:53])
    assert rest.mean() == pytest.approx(0.7, abs=0.01)
    assert len(set(samples(batches))) == len(samples(batches))


def test_every_batch_has_the_exact_mixture(study: Study, shape: DataShape) -> None:
    code = (whole_order(study, shape, "A0")[:, :, 0] == 0).sum(axis=1)
    assert set(code.tolist()) <= {11, 12}
    assert code.sum() == 4 * 15 * 16 * 7 // 10


def test_the_order_is_a_function_of_seed_and_arm_only(study: Study, shape: DataShape) -> None:
    assert np.array_equal(whole_order(study, shape, "B", 3), whole_order(study, shape, "B", 3))
    assert not np.array_equal(whole_order(study, shape, "B", 3), whole_order(study, shape, "B", 2))


@pytest.mark.parametrize(("number", "size", "initial"), [(500, 100, 30), (50, 1000, 100), (7, 3, 2), (40, 40, 40)])
def test_the_stock_buffer_is_webdatasets(number: int, size: int, initial: int) -> None:
    from webdataset.filters import _shuffle

    theirs = list(_shuffle(iter(range(number)), size, initial, rng=random.Random(5)))
    assert list(shuffle_through_buffer(iter(range(number)), size, initial, random.Random(5))) == theirs


def test_a_cold_buffer_begins_in_the_order_of_the_shards() -> None:
    """Right after a start the first samples come from the first `initial` only; a full shuffle has no such beginning."""
    first = list(shuffle_through_buffer(iter(range(10_000)), 1000, 100, random.Random(1)))[:50]
    assert max(first) < 250


def test_a_source_that_is_too_short_is_no_data(study: Study) -> None:
    short = DataShape(sources=study.sources, num_windows=(40_000, 250), profile=study.profile("ci"), num_slices=4)
    with pytest.raises(NoData, match="the slices alone need 288"):
        whole_order(study, short, "A0", 3)
    with pytest.raises(NoData, match="the slices alone need 288"):
        start_order(short)


def test_a_start_longer_than_its_share_reads_it_again_and_leaves_the_slices_alone(study: Study) -> None:
    """800 windows, slices of 288 in all: the start gets 256 of the 576 it needs, and reads them 2¼ times."""
    short = DataShape(sources=study.sources, num_windows=(40_000, 800), profile=study.profile("ci"), num_slices=4)
    drawn = [window for source, window in samples(start_order(short)) if source == 1]
    assert (len(drawn), len(set(drawn))) == (576, 256)
    in_slices = {window for source, window in samples(whole_order(study, short, "B-skip")) if source == 1}
    assert not in_slices & set(drawn)
