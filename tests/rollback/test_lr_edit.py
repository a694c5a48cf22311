"""The full edit scales what torch will really use, for every family; partial edits are seen through."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from rollback.errors import PlanRefused
from rollback.lr import lr_edits, prove_ratio
from rollback.lr.effect import Disproof, Proof, edited_tree
from tests.rollback.lr_cases import COMPUTED, FUNCTIONS, build, hugging_face_cases, lrs, plateau, train_step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ALL = [*COMPUTED, *FUNCTIONS, *hugging_face_cases()]


def _case(name: str) -> Any:
    return (COMPUTED | FUNCTIONS | hugging_face_cases())[name]


@dataclass
class Scheduled:
    state: dict[str, Any]
    file: str = "scheduler.bin"
    prefix: tuple[str | int, ...] = ()


@dataclass
class Optimized:
    groups: tuple[dict[str, Any], ...]
    file: str = "optimizer.bin"
    prefix: tuple[str | int, ...] = ()
    edits: list[Any] = field(default_factory=list)

    def group_keys(self, index: int, field: str) -> tuple[tuple[str | int, ...], ...]:
        return ((*self.prefix, "param_groups", index, field),)


def _edit(state: dict[str, Any], groups: list[dict[str, Any]], scale: float) -> tuple[dict[str, Any], list[Any]]:
    edits = lr_edits([Scheduled(state)], [Optimized(tuple(groups))], scale)
    new_state = edited_tree(state, (), [e for e in edits if e.file == "scheduler.bin"])
    wrapped = edited_tree({"param_groups": groups}, (), [e for e in edits if e.file == "optimizer.bin"])
    return new_state, wrapped["param_groups"]


def _trained(name: str, steps: int) -> tuple[Any, Any, Any]:
    model, optimizer, scheduler = build(_case(name))
    for _ in range(steps):
        train_step(model, optimizer, scheduler)
    return model, optimizer, scheduler


def _trace(model: Any, optimizer: Any, scheduler: Any, steps: int) -> list[tuple[float, ...]]:
    rows = [lrs(optimizer)]
    for _ in range(steps):
        train_step(model, optimizer, scheduler)
        rows.append(lrs(optimizer))
    return rows


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("steps", [1, 10])
def test_half_the_lr_is_exactly_half_at_the_first_and_the_next_twenty_steps(name: str, steps: int) -> None:
    model, optimizer, scheduler = _trained(name, steps)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    control = _trace(model, optimizer, scheduler, 20)
    state, groups = _edit(saved[2], saved[1]["param_groups"], 0.5)

    fresh_model, fresh_optimizer, fresh_scheduler = build(_case(name))
    fresh_model.load_state_dict(saved[0])
    fresh_optimizer.load_state_dict({"state": saved[1]["state"], "param_groups": groups})
    fresh_scheduler.load_state_dict(state)
    assert _trace(fresh_model, fresh_optimizer, fresh_scheduler, 20) == [tuple(x * 0.5 for x in row) for row in control]


def test_plateau_is_scaled_together_with_its_floor_and_its_eps() -> None:
    """At an LR near `eps` the unscaled threshold would stop the reductions of the scaled run."""
    metrics = [1.0] * 60

    def near_eps(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, min_lr=1e-5, eps=1.2e-4)

    for case in (plateau, near_eps):
        model, optimizer, scheduler = build(case)
        train_step(model, optimizer, scheduler, 1.0)
        saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
        control = []
        for metric in metrics:
            train_step(model, optimizer, scheduler, metric)
            control.append(lrs(optimizer))
        state, groups = _edit(saved[1], saved[0]["param_groups"], 0.5)
        model, optimizer, scheduler = build(case)
        optimizer.load_state_dict({"state": saved[0]["state"], "param_groups": groups})
        scheduler.load_state_dict(state)
        seen = []
        for metric in metrics:
            train_step(model, optimizer, scheduler, metric)
            seen.append(lrs(optimizer))
        assert seen == [tuple(x * 0.5 for x in row) for row in control]
        assert seen[-1] != seen[0]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("scale", [0.5, 0.3, 2.0])
def test_full_edit_is_proved_for_every_family(name: str, scale: float) -> None:
    _, optimizer, scheduler = _trained(name, 10)
    state, groups = scheduler.state_dict(), optimizer.state_dict()["param_groups"]
    new_state, new_groups = _edit(state, groups, scale)
    proof = prove_ratio(state, groups, new_state, new_groups, scale)
    assert isinstance(proof, Proof) and proof.ratio == scale


@pytest.mark.parametrize("name", ALL)
def test_the_one_liner_of_the_seed_is_disproved_for_every_family(name: str) -> None:
    """Seed 003, exp11: `base_lrs` and `_last_lr` halved in one file. No family is right at the first step."""
    _, optimizer, scheduler = _trained(name, 10)
    state, groups = scheduler.state_dict(), optimizer.state_dict()["param_groups"]
    edited = copy.deepcopy(state)
    for key in ("base_lrs", "_last_lr"):
        if key in edited:
            edited[key] = [x * 0.5 for x in edited[key]]
    assert isinstance(prove_ratio(state, groups, edited, groups, 0.5), Disproof)


def test_one_cycle_refusal_names_the_field_it_computes_from() -> None:
    _, optimizer, scheduler = _trained("one_cycle", 10)
    state, groups = scheduler.state_dict(), optimizer.state_dict()["param_groups"]
    edited = copy.deepcopy(groups)
    for group in edited:
        group["lr"] *= 0.5
        group["initial_lr"] *= 0.5
    answer = prove_ratio(state, groups, state, edited, 0.5)
    assert isinstance(answer, Disproof)
    assert "OneCycleLR computes from the optimizer's max_lr" in answer.reason


def test_only_the_group_lr_is_not_enough_for_a_lambda() -> None:
    _, optimizer, scheduler = _trained("lambda", 10)
    state, groups = scheduler.state_dict(), optimizer.state_dict()["param_groups"]
    edited = [group | {"lr": group["lr"] * 0.5} for group in groups]
    answer = prove_ratio(state, groups, state, edited, 0.5)
    assert isinstance(answer, Disproof) and "LambdaLR computes from its base_lrs" in answer.reason


def test_eta_min_left_behind_is_disproved() -> None:
    _, optimizer, scheduler = _trained("cosine_with_floor", 10)
    state, groups = scheduler.state_dict(), optimizer.state_dict()["param_groups"]
    new_state, new_groups = _edit(state, groups, 0.5)
    answer = prove_ratio(state, groups, new_state | {"eta_min": state["eta_min"]}, new_groups, 0.5)
    assert isinstance(answer, Disproof) and "eta_min" in answer.reason


def test_deepspeed_and_unknown_classes_cannot_be_proved() -> None:
    groups = [{"lr": 1e-3}]
    half = [{"lr": 5e-4}]
    for state in ({"last_batch_iteration": 3}, {"base_values": [1.0], "decay_t": 3}):
        assert isinstance(prove_ratio(state, groups, state, half, 0.5), Disproof)


def test_lr_kept_as_a_tensor_is_found_and_refused() -> None:
    groups = ({"lr": torch.tensor(1e-3)},)
    with pytest.raises(PlanRefused, match=r"param_groups\.0\.lr.*Tensor"):
        lr_edits([], [Optimized(groups)], 0.5)


def test_nested_schedulers_are_edited_in_place_of_their_file() -> None:
    _, _, scheduler = _trained("sequential_before", 3)
    edits = lr_edits([Scheduled(scheduler.state_dict(), prefix=("lr_scheduler",))], [], 0.5)
    assert ("lr_scheduler", "_schedulers", 1, "eta_min") in {edit.keys for edit in edits}
    assert all(edit.after == edit.before * 0.5 for edit in edits)
