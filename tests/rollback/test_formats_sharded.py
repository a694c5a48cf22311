"""Sharded checkpoints on real ranks: FSDP and DeepSpeed, raw and under Accelerate.

The two-rank DeepSpeed runs are slow and marked so; one of each family stays in the quick run.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from rollback.checkpoint.formats.deepspeed import role_in_tag
from rollback.checkpoint.layout import Role
from rollback.checkpoint.listing import list_checkpoints, open_checkpoint, read_state
from rollback.checks.verify import verify_checkpoint
from rollback.errors import Severity
from tests.builders.checkpoints import CheckpointFactory, convert_to_universal
from tests.rollback.test_formats_files import halve_lr


def findings(path: Path) -> set[tuple[str, str, str]]:
    found = verify_checkpoint(open_checkpoint(path))
    return {(f.check, f.severity.value, f.path) for f in found if f.severity is not Severity.INFO}


# --- FSDP


@pytest.mark.parametrize(
    "options",
    [
        {"version": 2, "state_dict": "SHARDED_STATE_DICT"},
        pytest.param({"version": 1, "state_dict": "SHARDED_STATE_DICT"}, marks=pytest.mark.slow),
        pytest.param({"version": 1, "state_dict": "FULL_STATE_DICT"}, marks=[pytest.mark.slow, pytest.mark.sample]),
        pytest.param({"version": 2, "state_dict": "FULL_STATE_DICT"}, marks=pytest.mark.slow),
        pytest.param({"version": 1, "state_dict": "SHARDED_STATE_DICT", "per_rank": True}, marks=pytest.mark.slow),
        pytest.param({"version": 2, "state_dict": "SHARDED_STATE_DICT", "per_rank": True}, marks=pytest.mark.slow),
    ],
    ids=lambda o: f"fsdp{o['version']}-{o['state_dict'][:5].lower()}{'-per-rank' if 'per_rank' in o else ''}",
)
def test_fsdp_under_accelerate(checkpoints: CheckpointFactory, root: Path, options: dict[str, object]) -> None:
    checkpoints.fsdp(root, processes=2, **options)
    path = root / "opt_step-10"
    assert findings(path) == set()
    state = halve_lr(path)
    assert (state.optimizer_step, state.world_size, state.scheduler_unit, state.rng_ranks) == (10, 2, 2, (0, 1))
    assert [o.rank for o in state.optimizers] == ([0, 1] if "per_rank" in options else [None])
    after = read_state(open_checkpoint(path))
    for optimizer, edited in zip(state.optimizers, after.optimizers, strict=True):
        assert optimizer.num_states == 4
        assert optimizer.moments == ("exp_avg", "exp_avg_sq") or "per_rank" in options
        assert edited.groups[0]["lr"] == optimizer.groups[0]["lr"] / 2  # type: ignore[operator]
    assert findings(path) == set()


def test_fsdp_without_a_rank_shard(checkpoints: CheckpointFactory, root: Path) -> None:
    checkpoints.fsdp(root, processes=2, version=2, state_dict="SHARDED_STATE_DICT")
    shard = root / "opt_step-10/accelerator_state/pytorch_model_fsdp_0/__1_0.distcp"
    shard.unlink()
    assert ("F2", "error", "accelerator_state/pytorch_model_fsdp_0/__1_0.distcp") in findings(root / "opt_step-10")


# --- DeepSpeed


def test_file_names_of_every_stage() -> None:
    assert role_in_tag("mp_rank_00_model_states.pt") == (Role.MODEL, None)
    assert role_in_tag("zero_pp_rank_3_mp_rank_01_model_states.pt") == (Role.MODEL, 3)
    assert role_in_tag("bf16_zero_pp_rank_137_mp_rank_00_optim_states.pt") == (Role.OPTIMIZER, 137)
    assert role_in_tag("zero_pp_rank_0_mp_rank_00_optim_states.pt.orig") is None
    assert role_in_tag("mp_rank_00.orig_model_states.pt") is None


def test_deepspeed_raw_on_one_rank(checkpoints: CheckpointFactory, root: Path) -> None:
    checkpoints.deepspeed(root, stage=1, save_at=[5, 10])
    assert [(c.step, c.format) for c in list_checkpoints(root)] == [(5, "deepspeed"), (10, "deepspeed")]
    path = root / "global_step10"
    assert findings(path) == set()
    state = halve_lr(path)
    assert (state.optimizer_step, state.world_size, state.scheduler_unit) == (10, 1, 1)
    assert state.counters["mp_rank_00_model_states.pt:iteration"] == 10
    model = torch.load(path / "mp_rank_00_model_states.pt", weights_only=True)
    assert model["lr_scheduler"]["base_lrs"] == [5e-4, 2.5e-4]


@pytest.mark.parametrize(
    ("text", "severity"), [(None, "warn"), ("", "warn"), ("global_step7", "warn"), ("../elsewhere", "warn")]
)
def test_pointer_that_leads_nowhere(
    checkpoints: CheckpointFactory, root: Path, text: str | None, severity: str
) -> None:
    """Without `latest` DeepSpeed returns (None, None) and trains from scratch."""
    checkpoints.deepspeed(root, stage=1, save_at=[5, 10])
    (root / "latest").unlink()
    if text is not None:
        (root / "latest").write_text(text)
    assert ("F9", severity, "../latest") in findings(root / "global_step10")


@pytest.mark.slow
@pytest.mark.sample
def test_universal_checkpoint(checkpoints: CheckpointFactory, root: Path) -> None:
    """One directory a parameter; the ranks that saved no longer matter, the parameters do."""
    checkpoints.deepspeed(root, stage=1, save_at=[5, 10])
    convert_to_universal(root, "global_step10")
    path = root / "global_step10_universal"
    assert [c.format for c in list_checkpoints(root) if c.step == 10] == ["deepspeed", "deepspeed universal"]
    assert findings(path) == set()
    state = halve_lr(path)
    assert (state.optimizer_step, state.optimizers[0].num_states, state.scheduler_unit) == (10, 4, 1)
    groups = torch.load(path / "zero" / "optimizer_state.pt", weights_only=False)["param_groups"]
    assert [group["initial_lr"] for group in groups] == [5e-4, 2.5e-4]
    (path / "zero" / "1.bias" / "exp_avg.pt").unlink()
    assert ("F2", "error", "zero/1.bias/exp_avg.pt") in findings(path)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_raw_on_two_ranks(checkpoints: CheckpointFactory, root: Path, stage: int) -> None:
    """Every rank holds its own groups; stage 3 also its own scheduler."""
    checkpoints.deepspeed(root, stage=stage, processes=2)
    path = root / "global_step10"
    assert findings(path) == set()
    state = halve_lr(path)
    assert len(state.optimizers) == (1 if stage == 0 else 2)
    assert len(state.schedulers) == (2 if stage == 3 else 1)
    assert (state.optimizer_step, state.world_size, state.topology["zero_stage"]) == (10, 2, stage)
    after = read_state(open_checkpoint(path))
    assert [[g["lr"] for g in o.groups] for o in after.optimizers] == [
        [g["lr"] / 2 for g in o.groups]
        for o in state.optimizers  # type: ignore[operator]
    ]
    assert findings(path) == set()


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "bf16"), [(1, False), (2, True), (3, False)])
def test_deepspeed_under_accelerate(checkpoints: CheckpointFactory, root: Path, stage: int, bf16: bool) -> None:
    """The seed's layout; the prepared scheduler counts steps times ranks."""
    checkpoints.deepspeed(root, stage=stage, processes=2, accelerate=True, bf16=bf16)
    path = root / "opt_step-10"
    assert findings(path) == set()
    state = read_state(open_checkpoint(path))
    assert state.checkpoint.format == "accelerate+deepspeed"
    assert (state.optimizer_step, state.world_size, state.scheduler_unit, state.rng_ranks) == (10, 2, 2, (0, 1))
    assert [s.owner for s in state.schedulers] == ["prepared"] and len(state.optimizers) == 2


@pytest.mark.slow
def test_missing_rank_and_a_shard_of_another_step(checkpoints: CheckpointFactory, root: Path) -> None:
    checkpoints.deepspeed(root, stage=1, processes=2, save_at=[5, 10])
    other = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(root / "global_step5" / other, root / "global_step10" / other)
    assert ("F4", "error", other) in findings(root / "global_step10")
    (root / "global_step10" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    assert ("F2", "error", "zero_pp_rank_0_mp_rank_00_optim_states.pt") in findings(root / "global_step10")
    (root / "global_step5" / other).unlink()
    assert ("F2", "error", ".") in findings(root / "global_step5")  # contiguous by name, but two ranks ran


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_deepspeeds_own_scheduler_lives_in_the_config(checkpoints: CheckpointFactory, root: Path, kind: str) -> None:
    checkpoints.deepspeed(root, stage=1, processes=2, accelerate=True, scheduler=kind)
    state = read_state(open_checkpoint(root / "opt_step-10"))
    (scheduler,) = state.schedulers
    assert scheduler.owner == "engine" and scheduler.state["last_batch_iteration"] == 9
    assert state.config["scheduler"]["type"] == kind  # type: ignore[index]
    assert any("config of the next launch" in note for note in state.notes)
