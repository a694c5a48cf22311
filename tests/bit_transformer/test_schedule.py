"""Schedules are pure functions of the optimizer step, and one function plans them all."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bit_transformer.errors import BadRecipe
from bit_transformer.evaluation.gate import GateConfig
from bit_transformer.training.schedule import ScheduleConfig, plan_schedule
from bit_transformer.training.state import TrainingProgress

WSD = ScheduleConfig(shape="wsd", warmup_steps=4, total_steps=20, decay_steps=10, final_fraction=0.1)


def test_wsd_is_the_written_list() -> None:
    """Four steps up, six flat, ten down to a tenth."""
    factors = [round(plan_schedule(WSD)(step), 4) for step in range(21)]
    assert factors == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1, 1, 0.91, 0.82, 0.73, 0.64, 0.55, 0.46, 0.37, 0.28, 0.19,
                       0.1]


def test_cosine_begins_and_ends_where_it_should() -> None:
    """Full after the warm-up, the final fraction at the last step and after it, never rising in between."""
    factor = plan_schedule(dataclasses.replace(WSD, shape="cosine", decay_steps=0))
    values = [factor(step) for step in range(3, 30)]
    assert values[1] == 1.0 and values[17] == pytest.approx(0.1) and values[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(values))


def test_onecycle_is_torchs_and_ends_with_the_run() -> None:
    """Playbook, tasks 1 and 2: the horizon is the run's own number of updates, and its last update has the final LR."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=100, final_div_factor=1 / (25 * 0.1))
    factor = plan_schedule(ScheduleConfig(shape="onecycle", total_steps=100, final_fraction=0.1))
    for step in range(100):
        assert factor(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-9), step
        optimizer.step()
        if step < 99:
            theirs.step()
    assert factor(99) == pytest.approx(0.1, abs=1e-9) and factor(200) == pytest.approx(0.1, abs=1e-9)


def test_raise_multiplies_from_its_step_on() -> None:
    """The raise is part of the schedule: pure, recorded, and nothing before it changes."""
    plain, raised = plan_schedule(WSD), plan_schedule(dataclasses.replace(WSD, raise_step=8, raise_factor=3.0))
    assert [raised(s) / plain(s) for s in (0, 7, 8, 19)] == pytest.approx([1, 1, 3, 3])


@settings(deadline=None)
@given(restart=st.integers(0, 20))
def test_rebuilt_schedule_goes_on_as_if_never_rebuilt(restart: int) -> None:
    """A scheduler rebuilt through the planner at any step and loaded gives the LRs of the one that never stopped."""
    def build() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, plan_schedule(WSD))

    optimizer, scheduler = build()
    lrs = []
    for step in range(25):
        if step == restart:
            states = optimizer.state_dict(), scheduler.state_dict()
            optimizer, scheduler = build()
            optimizer.load_state_dict(states[0])
            scheduler.load_state_dict(states[1])
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert lrs == [0.5 * plan_schedule(WSD)(step) for step in range(25)]


def test_rewarm_rises_to_the_full_rate() -> None:
    """After a rollback with a warm-up of four steps the factor climbs in quarters, then is the schedule's own."""
    progress, factor = flat_run()
    progress.rewarms = ((10, 4),)
    assert [factor(step) for step in (9, 10, 11, 12, 13, 14)] == [1, 0.25, 0.5, 0.75, 1, 1]


def test_newer_rewarm_ends_the_older_one_for_good() -> None:
    progress, factor = flat_run()
    progress.rewarms = ((0, 100), (10, 2))
    assert [factor(step) for step in (9, 10, 11, 12, 50)] == [0.1, 0.5, 1, 1, 1]


def test_plateaus_and_growths_cut_the_rate_from_their_step_on() -> None:
    """Half at each plateau, 1/√2 at each growth; what the run learns later counts without a new schedule."""
    progress, factor = flat_run()
    progress.decays, progress.growths = (5, 9), ((7, "depth"),)
    assert [factor(step) for step in (4, 5, 6, 7, 9)] == pytest.approx([1, 0.5, 0.5, 0.5 / 2**0.5, 0.25 / 2**0.5])


def flat_run() -> tuple[TrainingProgress, Callable[[int], float]]:
    """A run of constant LR, and its planned factor; no data are read."""
    plan: Any = None
    progress = TrainingProgress(plan, GateConfig())
    return progress, progress.planned_factor(ScheduleConfig(shape="constant"))


@pytest.mark.parametrize(("change", "sentence"), [
    ({"shape": "saw"}, "shape is 'saw', expected constant or wsd"),
    ({"decay_steps": 17}, "4 warm-up and 17 decay steps do not fit"),
    ({"total_steps": 0}, "total_steps is 0")])
def test_impossible_schedule_is_refused(change: dict[str, object], sentence: str) -> None:
    """A schedule that cannot be what it says is refused when it is made."""
    with pytest.raises(BadRecipe, match=sentence):
        dataclasses.replace(WSD, **change)
