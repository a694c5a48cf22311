"""LRs from recorded arguments are those that transformers and DeepSpeed then use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollback.lr.deepspeed import LR_FIELDS, deepspeed_lrs
from rollback.lr.oracle import Unknown
from rollback.lr.transformers import transformers_lrs
from tests.rollback.lr_cases import build, lrs, train_step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
# (lr_scheduler_type, lr_scheduler_kwargs)
SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {}),
    ("polynomial", {"lr_end": 1e-5, "power": 2.0}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 20}),
    ("cosine_with_min_lr", {"min_lr": 1e-4}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-4, "warmup_lr_rate": 0.2}),
    ("warmup_stable_decay", {"num_decay_steps": 10}),
    ("warmup_stable_decay", {"num_decay_steps": 12, "num_stable_steps": 9, "decay_type": "1-sqrt", "min_lr_ratio": 0.1}),
    ("warmup_stable_decay", {"num_decay_steps": 10, "warmup_type": "cosine", "decay_type": "linear"}),
]


def _trained(kind: str, steps: int, own: dict[str, Any] | None = None) -> tuple[Any, Any, Any]:
    from transformers import get_scheduler

    def case(optimizer: Any) -> Any:
        return get_scheduler(kind, optimizer, 5, 40, scheduler_specific_kwargs=own)

    model, optimizer, scheduler = build(case)
    for _ in range(steps):
        train_step(model, optimizer, scheduler)
    return model, optimizer, scheduler


@pytest.mark.parametrize("kind, own", SCHEDULES, ids=lambda v: v if isinstance(v, str) else ",".join(v) or "plain")
@pytest.mark.parametrize("saved_at", [0, 3, 5, 12, 35])
def test_schedules_of_transformers(kind: str, own: dict[str, Any], saved_at: int) -> None:
    """To the end of the horizon and beyond it."""
    model, optimizer, scheduler = _trained(kind, saved_at, own)
    state, groups = scheduler.state_dict(), [dict(g) for g in optimizer.state_dict()["param_groups"]]
    config = {"lr_scheduler_type": kind, "warmup_steps": 5, "learning_rate": 1e-3, "lr_scheduler_kwargs": own}
    rows = transformers_lrs(state, groups, config, 40, 60)
    assert not isinstance(rows, Unknown), rows
    for row in rows:
        assert row == pytest.approx(lrs(optimizer), rel=1e-12, abs=1e-18)
        train_step(model, optimizer, scheduler)


def test_every_schedule_of_transformers_is_known_or_no_lambda() -> None:
    """The two that are left out are classes of their own: one follows a metric, one searches."""
    from transformers.trainer_utils import SchedulerType

    assert {kind.value for kind in SchedulerType} - {kind for kind, _ in SCHEDULES} == {"reduce_lr_on_plateau", "greedy"}


@pytest.mark.parametrize("config", [{"warmup_ratio": 0.125}, {"warmup_steps": 0.125}], ids=["4.x", "5.x"])
def test_warmup_given_as_a_fraction(config: dict[str, Any]) -> None:
    _, optimizer, scheduler = _trained("linear", 3)
    groups = optimizer.state_dict()["param_groups"]
    rows = transformers_lrs(scheduler.state_dict(), groups, {"lr_scheduler_type": "linear"} | config, 40, 3)
    assert not isinstance(rows, Unknown) and rows[1][0] == pytest.approx(1e-3 * 4 / 5)


@pytest.mark.parametrize(
    "config, horizon, words",
    [
        ({"lr_scheduler_type": "linear", "warmup_steps": 9}, 40, "other arguments"),
        ({"lr_scheduler_type": "linear", "warmup_steps": 5}, 80, "other arguments"),
        ({"lr_scheduler_type": "my_own"}, 40, "my_own"),
        ({"lr_scheduler_type": "linear"}, 0, "horizon"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_loops": 2}}, 40, "lr_scheduler_kwargs"),
        ({"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"decay_type": "?"}}, 40, "lr_scheduler_kwargs"),
    ],
)
def test_arguments_that_do_not_reproduce_the_saved_lr_are_unknown(config: Any, horizon: int, words: str) -> None:
    _, optimizer, scheduler = _trained("linear", 20)
    groups = optimizer.state_dict()["param_groups"]
    answer = transformers_lrs(scheduler.state_dict(), groups, config, horizon, 5)
    assert isinstance(answer, Unknown) and words in answer.reason


WARMUP = {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": 5}
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "warmup log": ("WarmupLR", WARMUP),
    "warmup linear": ("WarmupLR", WARMUP | {"warmup_type": "linear"}),
    "warmup to the optimizer's lr": ("WarmupLR", {"warmup_num_steps": 5}),
    "decay log": ("WarmupDecayLR", WARMUP | {"total_num_steps": 50}),
    "decay linear": ("WarmupDecayLR", {"warmup_num_steps": 5, "total_num_steps": 20, "warmup_type": "linear"}),
    "cosine log": ("WarmupCosineLR", {"warmup_num_steps": 5, "total_num_steps": 30, "warmup_min_ratio": 0.1}),
    "cosine linear": ("WarmupCosineLR", {"warmup_num_steps": 5, "total_num_steps": 60, "warmup_type": "linear"}),
    "one cycle": ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 6}),
    "one cycle, stairs, decay": (
        "OneCycle",
        {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 6, "cycle_second_step_size": 9,
         "cycle_first_stair_count": 3, "decay_step_size": 4, "decay_lr_rate": 0.3},
    ),
    "range test": ("LRRangeTest", {"lr_range_test_min_lr": 1e-5, "lr_range_test_step_size": 7}),
    "range test, stairs": ("LRRangeTest", {"lr_range_test_step_size": 7, "lr_range_test_staircase": True}),
}  # fmt: skip


DEFAULTS_OF: dict[str, dict[str, Any]] = {
    "WarmupDecayLR": {"warmup_max_lr": 1e-3},
    "LRRangeTest": {"lr_range_test_min_lr": 1e-3},
}


@pytest.mark.parametrize("steps", [0, 1, 4, 5, 9, 17])
@pytest.mark.parametrize("name", OWN)
def test_schedulers_of_deepspeed(name: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime import lr_schedules

    kind, params = OWN[name]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=2e-3)
    scheduler = getattr(lr_schedules, kind)(optimizer, **params)
    for _ in range(steps):
        scheduler.step()
    groups = [dict(group) for group in optimizer.param_groups]
    config = {"scheduler": {"type": kind, "params": params}, "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}}}
    rows = deepspeed_lrs(scheduler.state_dict(), groups, config, 60)
    assert not isinstance(rows, Unknown), rows
    for row in rows:
        assert row == pytest.approx(lrs(optimizer), rel=1e-12)
        scheduler.step()


def test_every_scheduler_of_deepspeed_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

    assert set(VALID_LR_SCHEDULES) == {kind for kind, _ in OWN.values()} == set(LR_FIELDS)


@pytest.mark.parametrize("name", OWN)
def test_scaling_the_fields_that_are_named_scales_every_lr(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is edited in a config is what the scheduler computes from, and all of it."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime import lr_schedules

    kind, params = OWN[name]

    def used(scale: float) -> list[float]:
        sections = {"scheduler": DEFAULTS_OF.get(kind, {}) | params, "optimizer": {"lr": 2e-3}}
        named = [(section, field) for section, field in LR_FIELDS[kind] if field in sections[section]]
        for section, field in named or [("optimizer", "lr")]:
            sections[section][field] *= scale
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=sections["optimizer"]["lr"])
        scheduler = getattr(lr_schedules, kind)(optimizer, **sections["scheduler"])
        rows = []
        for _ in range(60):
            rows.append(lrs(optimizer)[0])
            scheduler.step()
        return rows

    assert used(0.5) == pytest.approx([lr * 0.5 for lr in used(1.0)], rel=1e-12)


def test_deepspeed_config_that_was_changed_is_unknown() -> None:
    params = {"warmup_max_lr": 2e-3, "warmup_num_steps": 5}
    config = {"scheduler": {"type": "WarmupLR", "params": params}}
    answer = deepspeed_lrs({"last_batch_iteration": 9}, [{"lr": 1e-3}], config, 5)
    assert isinstance(answer, Unknown) and "other arguments" in answer.reason
