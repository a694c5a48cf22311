"""LRs from recorded arguments are those that transformers and DeepSpeed then use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollback.lr.configured import deepspeed_lrs, transformers_lrs
from rollback.lr.oracle import Unknown
from tests.rollback.lr_cases import build, lrs, train_step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
KINDS = ["linear", "cosine", "constant", "constant_with_warmup", "cosine_with_restarts", "inverse_sqrt"]


def _trained(kind: str, steps: int) -> tuple[Any, Any, Any]:
    from transformers import get_scheduler

    model, optimizer, scheduler = build(lambda o: get_scheduler(kind, o, num_warmup_steps=5, num_training_steps=40))
    for _ in range(steps):
        train_step(model, optimizer, scheduler)
    return model, optimizer, scheduler


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved_at", [0, 3, 5, 12, 35])
def test_schedules_of_transformers(kind: str, saved_at: int) -> None:
    model, optimizer, scheduler = _trained(kind, saved_at)
    state, groups = scheduler.state_dict(), [dict(g) for g in optimizer.state_dict()["param_groups"]]
    config = {"lr_scheduler_type": kind, "warmup_steps": 5}
    rows = transformers_lrs(state, groups, config, 40, 20)
    assert not isinstance(rows, Unknown)
    for row in rows:
        assert row == pytest.approx(lrs(optimizer), rel=1e-12, abs=1e-18)
        train_step(model, optimizer, scheduler)


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
        ({"lr_scheduler_type": "polynomial"}, 40, "polynomial"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}}, 40, "lr_scheduler_kwargs"),
    ],
)
def test_arguments_that_do_not_reproduce_the_saved_lr_are_unknown(config: Any, horizon: int, words: str) -> None:
    _, optimizer, scheduler = _trained("linear", 20)
    groups = optimizer.state_dict()["param_groups"]
    answer = transformers_lrs(scheduler.state_dict(), groups, config, horizon, 5)
    assert isinstance(answer, Unknown) and words in answer.reason


@pytest.mark.parametrize("steps", [1, 4, 5, 9])
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
@pytest.mark.parametrize("warmup_type", ["log", "linear"])
def test_schedulers_of_deepspeed(kind: str, warmup_type: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime import lr_schedules

    params = {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": 5, "warmup_type": warmup_type}
    if kind == "WarmupDecayLR":
        params["total_num_steps"] = 50
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=1e-3)
    scheduler = getattr(lr_schedules, kind)(optimizer, **params)
    for _ in range(steps):
        scheduler.step()
    groups = [dict(group) for group in optimizer.param_groups]
    rows = deepspeed_lrs(scheduler.state_dict(), groups, {"scheduler": {"type": kind, "params": params}}, 20)
    assert not isinstance(rows, Unknown)
    for row in rows:
        assert row == pytest.approx(lrs(optimizer), rel=1e-12)
        scheduler.step()


def test_deepspeed_config_that_was_changed_is_unknown() -> None:
    params = {"warmup_max_lr": 2e-3, "warmup_num_steps": 5}
    config = {"scheduler": {"type": "WarmupLR", "params": params}}
    answer = deepspeed_lrs({"last_batch_iteration": 9}, [{"lr": 1e-3}], config, 5)
    assert isinstance(answer, Unknown) and "other arguments" in answer.reason
