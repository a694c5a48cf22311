"""The LR oracle says, without torch, what torch will do for the next hundred steps."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as L

from rollback.checkpoint.listing import open_checkpoint, read_state
from rollback.lr import Proof, SchedulerClass, Unknown, infer_scheduler_class, next_lrs, prove_ratio
from rollback.lr.effect import Disproof
from tests.rollback.lr_cases import COMPUTED, FUNCTIONS, build, lrs, plateau, train_step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def _saved(optimizer: Any, scheduler: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return copy.deepcopy(scheduler.state_dict()), copy.deepcopy(optimizer.state_dict()["param_groups"])


# Corners: no milestone, past the horizon, momentum that moves with the LR.
CORNERS: dict[str, Any] = {
    "one_cycle_after_a_milestone": lambda o: L.SequentialLR(  # its constructor moves everybody's initial_lr
        o, [L.LinearLR(o, 0.1, 1.0, 8), L.OneCycleLR(o, [1e-3, 2e-3], total_steps=200)], [8]
    ),
    "cyclic_after_a_milestone": lambda o: L.SequentialLR(
        o, [L.LinearLR(o, 0.1, 1.0, 8), L.CyclicLR(o, 1e-4, 1e-3, 6, cycle_momentum=False)], [8]
    ),
    "milestone_at_zero_and_twice": lambda o: L.SequentialLR(
        o,
        [L.LinearLR(o, 0.1, 1.0, 8), L.StepLR(o, 3, 0.5), L.ConstantLR(o, 0.5, 4), L.ExponentialLR(o, 0.9)],
        [0, 7, 7],
    ),
    "sequential_of_one": lambda o: L.SequentialLR(o, [L.StepLR(o, 7, 0.5)], []),
    "multi_step_without_milestones": lambda o: L.MultiStepLR(o, [], 0.3),
    "polynomial_past_its_end": lambda o: L.PolynomialLR(o, 9, 1.5),
    "cosine_past_its_end": lambda o: L.CosineAnnealingLR(o, 7, eta_min=1e-5),
    "one_cycle_three_phase": lambda o: L.OneCycleLR(
        o, max_lr=[1e-3, 2e-3], total_steps=140, three_phase=True, base_momentum=0.8, max_momentum=0.93
    ),
    "cyclic_with_momentum": lambda o: L.CyclicLR(o, [1e-4, 2e-4], [1e-3, 3e-3], 5, 8, base_momentum=0.8),
}


@pytest.mark.parametrize(
    ("name", "saved_at"),
    [
        *((name, at) for name in COMPUTED for at in (0, 1, 10, 12, 25)),
        *((n, at) for n in CORNERS for at in (0, 1, 7, 8, 13, 30)),
    ],
)
def test_next_hundred_lrs_are_bit_identical_to_torch(name: str, saved_at: int) -> None:
    """Same operations in the same order: not close, equal."""
    model, optimizer, scheduler = build((COMPUTED | CORNERS)[name])
    for _ in range(saved_at):
        train_step(model, optimizer, scheduler)
    state, groups = _saved(optimizer, scheduler)
    expected = [lrs(optimizer)]
    for _ in range(99):
        train_step(model, optimizer, scheduler)
        expected.append(lrs(optimizer))
    assert next_lrs(state, groups, 100) == tuple(expected)


def test_a_composite_inside_another_is_unknown_and_its_factor_proved() -> None:
    def case(o: Any) -> Any:
        return L.ChainedScheduler(
            [L.SequentialLR(o, [L.LinearLR(o, 0.1, 1.0, 8), L.CosineAnnealingLR(o, 60)], [8]), L.ExponentialLR(o, 0.98)]
        )

    model, optimizer, scheduler = build(case)
    train_step(model, optimizer, scheduler)
    state, groups = _saved(optimizer, scheduler)
    answer = next_lrs(state, groups, 4)
    assert isinstance(answer, Unknown) and "inside another" in answer.reason and not answer.contradicts
    edited = [{**group, "lr": group["lr"] / 2, "initial_lr": group["initial_lr"] / 2} for group in groups]
    assert isinstance(prove_ratio(state, groups, state, edited, 0.5), Disproof)  # the cosine's own base_lrs
    halved = copy.deepcopy(state)
    for part in (*halved["_schedulers"][0]["_schedulers"], halved["_schedulers"][1]):
        part["base_lrs"] = [lr / 2 for lr in part["base_lrs"]]
    assert isinstance(prove_ratio(state, groups, halved, edited, 0.5), Proof)


def test_one_cycle_past_its_end_is_unknown_as_torch_raises_there() -> None:
    model, optimizer, scheduler = build(COMPUTED["one_cycle"])
    for _ in range(125):
        train_step(model, optimizer, scheduler)
    assert not isinstance(next_lrs(*_saved(optimizer, scheduler), 5), Unknown)
    answer = next_lrs(*_saved(optimizer, scheduler), 8)
    assert isinstance(answer, Unknown) and "130 steps" in answer.reason


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_lrs_kept_as_tensors_are_foretold_from_the_file(name: str, dtype: str, tmp_path: Path) -> None:
    """Written by torch, read by our reader: what torch rounds after every operation is rounded there, too."""

    def case(optimizer: Any) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=getattr(torch, dtype))
        return COMPUTED[name](optimizer)

    model, optimizer, scheduler = build(case)
    for _ in range(10):
        train_step(model, optimizer, scheduler)
    torch.save({"scheduler": scheduler.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "step_10.pt")
    read = read_state(open_checkpoint(tmp_path / "step_10.pt"))
    expected = []
    for _ in range(100):
        expected.append(lrs(optimizer))
        train_step(model, optimizer, scheduler)
    answer = next_lrs(read.schedulers[0].state, read.optimizers[0].groups, 100)
    assert not isinstance(answer, Unknown), answer
    assert list(answer) == expected


def test_plateau_without_metrics_is_unknown() -> None:
    _, optimizer, scheduler = build(plateau)
    answer = next_lrs(*_saved(optimizer, scheduler), 5)
    assert isinstance(answer, Unknown) and "metric" in answer.reason


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_is_not_saved_is_unknown_not_guessed(name: str) -> None:
    model, optimizer, scheduler = build(FUNCTIONS[name])
    for _ in range(10):
        train_step(model, optimizer, scheduler)
    answer = next_lrs(*_saved(optimizer, scheduler), 20)
    assert isinstance(answer, Unknown) and "not saved" in answer.reason


@pytest.mark.parametrize("name", COMPUTED)
def test_prepared_scheduler_of_two_processes_is_stepped_twice_per_optimizer_step(name: str) -> None:
    """`AcceleratedScheduler` steps `num_processes` times: the rows are every second LR."""
    model, optimizer, scheduler = build(COMPUTED[name])
    for _ in range(6):
        train_step(model, optimizer, scheduler)
    state, groups = _saved(optimizer, scheduler)
    single = next_lrs(state, groups, 41)
    assert not isinstance(single, Unknown)
    assert next_lrs(state, groups, 21, scheduler_steps=2) == single[::2]


@pytest.mark.parametrize("name", [*COMPUTED, *FUNCTIONS])
def test_class_is_told_by_the_keys(name: str) -> None:
    _, _, scheduler = build((COMPUTED | FUNCTIONS)[name])
    expected = {"MultiplicativeLR": "LambdaLR"}.get(type(scheduler).__name__, type(scheduler).__name__)
    assert infer_scheduler_class(scheduler.state_dict()) == SchedulerClass(expected)


def test_a_subclass_with_further_float_fields_is_not_taken_for_its_base() -> None:
    _, _, scheduler = build(COMPUTED["step"])
    state = scheduler.state_dict() | {"my_floor": 1e-5}
    assert infer_scheduler_class(state) is None
    assert isinstance(next_lrs(state, [{"lr": 1e-3}], 3), Unknown)


@pytest.mark.parametrize("field, message", [("base_lrs", "edited before"), ("_last_lr", "disagree")])
def test_state_that_does_not_reproduce_its_own_lr_is_unknown(field: str, message: str) -> None:
    """The seed's edit leaves such states behind: nothing is foretold from them."""
    model, optimizer, scheduler = build(COMPUTED["cosine"])
    for _ in range(10):
        train_step(model, optimizer, scheduler)
    state, groups = _saved(optimizer, scheduler)
    state[field] = [value * 0.5 for value in state[field]]
    answer = next_lrs(state, groups, 5)
    assert isinstance(answer, Unknown) and message in answer.reason


def test_deepspeed_scheduler_is_unknown_with_the_place_where_its_lrs_are() -> None:
    answer = next_lrs({"last_batch_iteration": 9}, [{"lr": 1e-3}], 5)
    assert isinstance(answer, Unknown) and "config" in answer.reason


def test_oracle_leaves_its_arguments_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, optimizer, scheduler = build(COMPUTED["sequential_before"])
    state, groups = _saved(optimizer, scheduler)
    before = copy.deepcopy((state, groups))
    next_lrs(state, groups, 50)
    assert (state, groups) == before
