"""What `chronicle keep` keeps: never less than is safe, dense where an onset is likely, within the bytes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rollback.plan.retention import SAFE, Save, loss_of, plan_retention


def every(interval: int, count: int, size: int = 10) -> list[Save]:
    return [Save(f"step-{interval * n}", interval * n, size) for n in range(1, count + 1)]


saves_of_runs = st.lists(
    st.tuples(st.integers(1, 10_000), st.integers(0, 100), st.booleans()), max_size=40, unique_by=lambda row: row[0]
).map(lambda rows: [Save(f"step-{step}", step, size, verified) for step, size, verified in rows])


@given(saves_of_runs, st.integers(0, 5_000), st.lists(st.integers(0, 10_000), max_size=3), st.data())
def test_what_is_never_removed(saves: list[Save], budget: int, onsets: list[int], data: st.DataObject) -> None:
    pinned = data.draw(st.sets(st.sampled_from([save.name for save in saves]))) if saves else set()
    plan = plan_retention(saves, budget_bytes=budget, onsets=onsets, pinned=pinned)
    kept = [save for save, _ in plan.keep]
    assert sorted([*kept, *plan.remove], key=lambda s: s.step) == sorted(saves, key=lambda s: s.step)
    good = sorted((save for save in saves if save.verified), key=lambda save: save.step)
    assert set(good[-SAFE:]) <= set(kept)
    assert pinned <= {save.name for save in kept}
    if onsets:
        assert set([save for save in good if save.step <= onsets[-1]][-SAFE:]) <= set(kept)
    if saves:
        assert max(saves, key=lambda save: save.step) in kept
    if plan.kept_bytes > budget:  # then nothing more could go
        assert all(why for save, why in plan.keep)
    assert plan.expected_loss >= plan.expected_before - 1e-9 and plan.worst_loss >= plan.worst_before


def test_nothing_goes_while_it_fits() -> None:
    plan = plan_retention(every(100, 8), budget_bytes=80)
    assert not plan.remove and plan.expected_loss == plan.expected_before


def test_recent_ones_stay_dense_and_old_ones_thin_out() -> None:
    plan = plan_retention(every(100, 400), budget_bytes=10 * 80)
    steps = [save.step for save, _ in plan.keep]
    assert len(steps) == 80
    assert all(loss_of(steps, onset) <= 200 for onset in range(38_000, 40_000, 37))
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    assert sum(gaps[: len(gaps) // 2]) / sum(gaps[len(gaps) // 2 :]) > 3


def test_a_run_whose_troubles_are_found_late_keeps_a_longer_window() -> None:
    early = plan_retention(every(100, 400), budget_bytes=10 * 120)
    late = plan_retention(every(100, 400), budget_bytes=10 * 120, delays=[15_000])
    assert late.window == 15_000 > early.window
    onsets = range(25_500, 30_000, 50)
    losses = [sum(loss_of([save.step for save, _ in plan.keep], onset) for onset in onsets) for plan in (early, late)]
    assert losses[1] < losses[0]


def test_what_cannot_be_resumed_from_goes_first() -> None:
    saves = [Save("a", 100, 10), Save("b", 200, 10, verified=False), Save("c", 300, 10), Save("d", 400, 10)]
    assert [save.name for save in plan_retention(saves, budget_bytes=30).remove] == ["b"]


def test_an_open_incident_keeps_its_checkpoint_when_a_newer_one_comes() -> None:
    """The newest incident's checkpoints are pinned; the older one, that nobody has answered, is as likely the one."""
    saves, onsets = every(100, 400), [12_345, 30_150]
    blind = plan_retention(saves, budget_bytes=10 * 20, onsets=onsets)
    plan = plan_retention(saves, budget_bytes=10 * 20, onsets=onsets, open_onsets=onsets)
    assert loss_of([save.step for save, _ in plan.keep], 12_345) == 45 < loss_of([save.step for save, _ in blind.keep], 12_345)
    assert loss_of([save.step for save, _ in plan.keep], 30_150) == 50
    assert plan.kept_bytes <= 200


def test_thinned_gaps_do_not_widen_the_window() -> None:
    """The window counts saves, and old gaps are those that earlier plans left."""
    thinned = [save for save in every(100, 400) if save.step % 1000 == 0 or save.step > 39_000]
    assert plan_retention(thinned, budget_bytes=10**6).window == plan_retention(every(100, 400), budget_bytes=10**6).window
