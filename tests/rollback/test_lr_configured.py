"""The fields of a DeepSpeed config that are edited are all that DeepSpeed's own schedulers compute from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollback.lr.deepspeed import LR_FIELDS
from tests.rollback.lr_cases import lrs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

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
