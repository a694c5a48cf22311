"""The data plan: exact mixture, no repeats, elastic over ranks, and restarts that are only arithmetic."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chronicle.data import DataError, DataPlan, PlanChanged, Segment, Segments, SourceSpec, step_digest


def _plan(num_code: int = 500, num_prose: int = 300, *, batch_size: int = 16, seed: int = 7,
          weights: tuple[int, int] = (7, 3)) -> DataPlan:
    return DataPlan(seed=seed, batch_size=batch_size, sources=(
        SourceSpec(name="code", num_samples=num_code, digest="a", weight=weights[0]),
        SourceSpec(name="prose", num_samples=num_prose, digest="b", weight=weights[1])))


def _rows(plan: DataPlan, steps: range, segments: Segments | None = None) -> list[tuple[int, int]]:
    segments = segments or Segments()
    return [(int(s), int(i)) for step in steps for s, i in plan.batch_ids(step, segments)]


@given(batch_size=st.integers(1, 64), first=st.integers(1, 9), second=st.integers(1, 9), step=st.integers(0, 10**9))
def test_mixture_is_exact_in_every_batch(batch_size: int, first: int, second: int, step: int) -> None:
    """Every batch holds the exact share of each source within one sample, at any step, also right after a restart."""
    rows = _plan(batch_size=batch_size, weights=(first, second)).batch_ids(step)
    assert len(rows) == batch_size
    assert abs(int((rows[:, 0] == 0).sum()) - batch_size * first / (first + second)) < 1


@settings(max_examples=10, deadline=None)
@given(num_steps=st.integers(1, 100))
def test_drawn_before_counts_what_was_drawn(num_steps: int) -> None:
    """The O(1) count equals the counted draws."""
    plan = _plan()
    rows = _rows(plan, range(num_steps))
    assert plan.drawn_before(num_steps) == (sum(s == 0 for s, _ in rows), sum(s == 1 for s, _ in rows))


def test_no_sample_repeats_within_an_epoch_and_all_come() -> None:
    """60 batches of 16 at 7:3 draw 672 of 500 code windows: every one once, 172 of them a second time."""
    plan = _plan()
    times = Counter(index for source, index in _rows(plan, range(60)) if source == 0)
    assert Counter(times.values()) == {1: 500 - 172, 2: 172}


def test_skipped_batches_are_never_read_and_nothing_repeats() -> None:
    """Rollback to 20 with 10 batches skipped: steps 20, 21, … read batches 30, 31, …."""
    plan, segments = _plan(5000, 5000), Segments().resumed(20, skip_batches=10)
    assert _rows(plan, range(20, 40), segments) == _rows(plan, range(30, 50))
    assert _rows(plan, range(20), segments) == _rows(plan, range(20))


def test_a_skip_is_remembered_by_later_restarts() -> None:
    """A restart after a skip does not read the skipped batches after all."""
    segments = Segments().resumed(20, skip_batches=10).resumed(30).resumed(35, skip_batches=5)
    assert [segments.position(step) for step in (19, 20, 34, 35)] == [19, 30, 44, 50]


@settings(max_examples=10, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=1, max_size=5))
def test_reshuffle_repeats_nothing_and_loses_nothing(changes: list[tuple[int, bool]]) -> None:
    """However often the unseen remainder is reshuffled, an epoch still holds every sample exactly once."""
    plan, segments, step = _plan(311, 200), Segments(), 0
    for advance, reshuffle in changes:
        step += advance
        segments = segments.resumed(step, reshuffle=reshuffle)
    times = Counter(index for source, index in _rows(plan, range(60), segments) if source == 0)
    assert Counter(times.values()) == {2: 311 - (672 - 622), 3: 672 - 622}


def test_reshuffle_changes_the_order_of_the_rest_only() -> None:
    """Before the reshuffle nothing changes, after it the order is another one, in the following epochs too."""
    plan, segments = _plan(), Segments().resumed(10, reshuffle=True)
    assert _rows(plan, range(10), segments) == _rows(plan, range(10))
    for first in (10, 100):
        new, old = _rows(plan, range(first, first + 10), segments), _rows(plan, range(first, first + 10))
        assert sum(a == b for a, b in zip(new, old, strict=True)) < len(new) / 8


def test_changed_plan_is_refused_with_the_difference() -> None:
    """A resumed run must not go on with other data: every changed field is named, old and new."""
    stored = _plan().to_json()
    with pytest.raises(PlanChanged, match=r"seed was 7, is 8.*source `code` was .*500.* is .*501"):
        _plan(501, seed=8).require_same(stored)
    _plan().require_same(stored)


def test_plan_and_segments_survive_json() -> None:
    """What a checkpoint stores is what comes back."""
    plan, segments = _plan(), Segments().resumed(5, skip_batches=3).resumed(9, reshuffle=True)
    assert DataPlan.from_json(plan.to_json()) == plan
    assert DataPlan.from_json(plan.to_json()).plan_hash == plan.plan_hash
    assert Segments.from_json(segments.to_json()) == segments


def test_backward_segments_are_refused() -> None:
    """A segment that would read a batch a second time is a damaged state."""
    with pytest.raises(DataError, match="go backwards"):
        Segments(items=(Segment(step=0, position=0, generation=0), Segment(step=10, position=9, generation=0)))


def test_digest_tells_batches_apart() -> None:
    """Equal digests mean equal samples in equal order."""
    plan = _plan()
    digests = [step_digest(plan.batch_ids(step)) for step in range(200)]
    assert len(set(digests)) == 200
    assert digests[3] == step_digest(plan.batch_ids(3)) and len(digests[3]) == 16


@pytest.mark.parametrize(("fields", "sentence"), [
    ({"num_samples": 0}, "source `x` is empty"), ({"weight": 0}, "weight 0")])
def test_impossible_source_is_refused(fields: dict[str, int], sentence: str) -> None:
    """An empty source or a weight of nothing is said before training."""
    with pytest.raises(DataError, match=sentence):
        SourceSpec(**{"name": "x", "num_samples": 1, "digest": "", "weight": 1, **fields})


def test_many_steps_at_once_are_the_same_batches() -> None:
    """Over skips, reshuffles, epoch ends and batches that no weight divides: block and single steps are equal."""
    for batch_size, num_a in ((16, 1000), (7, 97), (1, 50)):
        plan = DataPlan(seed=batch_size, batch_size=batch_size, sources=tuple(
            SourceSpec(name=name, num_samples=count, digest="x", weight=weight)
            for name, count, weight in (("a", num_a, 7), ("b", 53, 3), ("c", 11, 1))))
        segments = Segments().resumed(40, skip_batches=5).resumed(55, reshuffle=True).resumed(80, skip_batches=2)
        block = plan.block_ids(30, 70, segments)
        assert all(np.array_equal(block[step - 30], plan.batch_ids(step, segments)) for step in range(30, 100))


def test_order_is_the_one_of_version_1() -> None:
    """A plan that is resumed years later draws the same samples: the digest of two steps, written down once."""
    plan = DataPlan(seed=1, batch_size=16, sources=(SourceSpec(name="a", num_samples=1000, digest="x", weight=7),
                                                    SourceSpec(name="b", num_samples=53, digest="x", weight=3)))
    assert (step_digest(plan.batch_ids(0)), step_digest(plan.batch_ids(1234))) == (
        "b3c1884ebcf7c988", "472317557c025766")
