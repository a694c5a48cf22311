"""Accelerate checkpoints, single process and DDP, written by Accelerate: found, selected, read, compared with torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollback.checkpoint.layout import Role
from rollback.checkpoint.listing import (
    list_checkpoints,
    list_root_strays,
    open_checkpoint,
    read_state,
)
from rollback.checkpoint.manifest import write_manifest
from rollback.checkpoint.select import select_checkpoint
from rollback.errors import AmbiguousStep, CheckpointNotFound, StrayFiles, UnknownFormat
from tests.builders.checkpoints import CheckpointFactory

SEED = {"folder": "opt_step-{step}/accelerator_state", "scheduler": "register", "counter": True, "save_at": [5, 10]}
DDP = {"folder": "opt_step-{step}/accelerator_state", "scheduler": "both", "processes": 2}
AUTOMATIC = {"automatic": True, "save_at": [4, 8]}


@pytest.fixture
def seed_root(checkpoints: CheckpointFactory, root: Path) -> Path:
    return checkpoints.accelerate(root, **SEED)


@pytest.fixture
def automatic_root(checkpoints: CheckpointFactory, tmp_path: Path) -> Path:
    return checkpoints.accelerate(tmp_path / "project", **AUTOMATIC) / "checkpoints"


def test_seed_layout_is_listed_by_the_step_in_its_name(seed_root: Path) -> None:
    found = list_checkpoints(seed_root)
    assert [(c.path.name, c.step, c.step_source, c.format) for c in found] == [
        ("opt_step-5", 5, "name", "accelerate"),
        ("opt_step-10", 10, "name", "accelerate"),
    ]
    roles = {file.path: file.role for file in found[0].files}
    assert roles == {
        "accelerator_state/custom_checkpoint_0.pkl": Role.CUSTOM,
        "accelerator_state/custom_checkpoint_1.pkl": Role.CUSTOM,
        "accelerator_state/model.safetensors": Role.MODEL,
        "accelerator_state/optimizer.bin": Role.OPTIMIZER,
        "accelerator_state/random_states_0.pkl": Role.RNG,
    }


def test_state_is_what_torch_loads(seed_root: Path) -> None:
    state = read_state(open_checkpoint(seed_root / "opt_step-10"))
    folder = seed_root / "opt_step-10" / "accelerator_state"
    (scheduler,) = state.schedulers
    assert dict(scheduler.state) == torch.load(folder / "custom_checkpoint_0.pkl", weights_only=True)
    assert (scheduler.owner, scheduler.authoritative) == ("registered", True)
    (optimizer,) = state.optimizers
    groups = torch.load(folder / "optimizer.bin", weights_only=True)["param_groups"]
    assert [group["lr"] for group in optimizer.groups] == [group["lr"] for group in groups]
    assert (optimizer.steps, optimizer.num_states, optimizer.moments) == ((10, 10), 4, ("exp_avg", "exp_avg_sq"))
    assert state.counters["accelerator_state/custom_checkpoint_1.pkl:samples"] == 30
    assert (state.optimizer_step, state.scheduler_unit, state.world_size, state.rng_ranks) == (10, 1, 1, (0,))


def test_prepared_scheduler_counts_processes_and_the_registered_one_wins(
    checkpoints: CheckpointFactory, root: Path
) -> None:
    """DDP on two ranks: last_epoch 20 for 10 steps, and the copy that is loaded last is the one that counts."""
    checkpoints.accelerate(root, **DDP)
    state = read_state(open_checkpoint(root / "opt_step-10"))
    owners = [(s.owner, s.authoritative, s.state["last_epoch"]) for s in state.schedulers]
    assert owners == [("prepared", False, 20), ("registered", True, 20)]
    assert (state.scheduler_unit, state.world_size, state.rng_ranks) == (2, 2, (0, 1))
    assert len(set(state.rng_digests.values())) == 2


def test_automatic_names_count_saves_and_the_counters_give_the_step(automatic_root: Path) -> None:
    """`checkpoint_1` is the second save; Adam says it is step 8."""
    found = list_checkpoints(automatic_root)
    assert [(c.path.name, c.step, c.step_source) for c in found] == [
        ("checkpoint_0", 4, "counters"),
        ("checkpoint_1", 8, "counters"),
    ]
    assert select_checkpoint(found, 8).path.name == "checkpoint_1"


def test_state_directory_itself_is_a_checkpoint(seed_root: Path) -> None:
    found = open_checkpoint(seed_root / "opt_step-5" / "accelerator_state")
    assert (found.format, found.step, found.step_source) == ("accelerate", 5, "counters")


def test_missing_step_names_the_two_nearest(seed_root: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="nearest are 5 and 10"):
        select_checkpoint(list_checkpoints(seed_root), 7)


def move_to_abandoned(checkpoint: Path, rollback: str, launch: int) -> Path:
    moved = checkpoint.parent.parent / "abandoned" / rollback / checkpoint.name
    moved.parent.mkdir(parents=True)
    checkpoint.rename(moved)
    write_manifest(moved, step=10, launch=launch, digests=False)
    return moved


def test_a_bare_step_is_the_checkpoint_in_the_directory_and_the_abandoned_one_is_its_twin(seed_root: Path) -> None:
    """After each rollback every step is there twice; the seed's exp10 went back to an abandoned one by its launch."""
    moved = move_to_abandoned(seed_root / "opt_step-10", "rb-1", launch=8)
    (seed_root / "opt_step-5").rename(seed_root / "opt_step-10")
    write_manifest(seed_root / "opt_step-10", step=10, launch=9, digests=False)
    found = list_checkpoints(seed_root)
    chosen = select_checkpoint(found, 10)
    assert (chosen.path, chosen.abandoned) == (seed_root / "opt_step-10", None)
    assert "launch 8, abandoned by rb-1" in chosen.twins[0]
    chosen = select_checkpoint(found, 10, launch=8)
    assert (chosen.path, chosen.abandoned) == (moved, "rb-1")
    assert [c.abandoned for c in list_checkpoints(seed_root, include_abandoned=False)] == [None]


def test_a_step_that_was_abandoned_twice_is_refused_with_a_list_and_picked_by_launch(seed_root: Path) -> None:
    """Nothing in the directory says which of them is meant."""
    move_to_abandoned(seed_root / "opt_step-10", "rb-1", launch=8)
    (seed_root / "opt_step-5").rename(seed_root / "opt_step-10")
    move_to_abandoned(seed_root / "opt_step-10", "rb-2", launch=9)
    with pytest.raises(AmbiguousStep, match="exists 2 times") as caught:
        select_checkpoint(list_checkpoints(seed_root), 10)
    assert "launch 8, abandoned by rb-1" in caught.value.message
    assert "@8`" in (caught.value.remedy or "") or "@9`" in (caught.value.remedy or "")


def test_a_link_to_a_checkpoint_is_no_second_one(seed_root: Path) -> None:
    (seed_root / "opt_step-10").rename(seed_root.parent / "kept")
    (seed_root.parent / "kept").rename(seed_root / "step-10")
    (seed_root / "opt_step-10").symlink_to("step-10")
    found = select_checkpoint(list_checkpoints(seed_root), 10)
    assert found.path == seed_root / "step-10"


STRAYS = [
    "custom_checkpoint_0.pkl.orig", "custom_checkpoint_0.pkl~", "custom_checkpoint_0.pkl.bak",
    "custom_checkpoint_0 (copy).pkl", ".custom_checkpoint_0.pkl.swp", "#custom_checkpoint_0.pkl#",
    "custom_checkpoint_0_old.pkl", "custom_checkpoint_00.pkl", "my_custom_checkpoint.pkl", "optimizer.bin.1",
    "scheduler-backup.bin", "random_states_0.pkl.numpy1", ".DS_Store", ".nfs000000000000abcd", "model.safetensors.tmp",
    "optimizer.bin.gz", "Copy of optimizer.bin",
]  # fmt: skip


@pytest.mark.parametrize("name", STRAYS)
def test_stray_is_refused_by_name_before_a_byte_is_read(seed_root: Path, name: str) -> None:
    """Seed exp9. That nothing is read is shown by files that cannot be read: they are damaged, yet not complained of."""
    folder = seed_root / "opt_step-10" / "accelerator_state"
    (folder / name).write_bytes(b"")
    for file in folder.glob("*.bin"):
        file.write_bytes(b"garbage")
    checkpoint = open_checkpoint(seed_root / "opt_step-10")
    assert checkpoint.strays == (f"accelerator_state/{name}",)
    with pytest.raises(StrayFiles) as caught:
        read_state(checkpoint)
    assert name in caught.value.message and "quarantine" in (caught.value.remedy or "")


@pytest.mark.parametrize("name", ["README.md", "config.json", "unwrapped_model", "tokenizer.json", "eval_results.json"])
def test_what_no_loader_takes_for_state_is_no_stray(seed_root: Path, name: str) -> None:
    (seed_root / "opt_step-10" / "accelerator_state" / name).mkdir()
    (seed_root / "opt_step-10" / name).mkdir()
    assert open_checkpoint(seed_root / "opt_step-10").strays == ()


@pytest.mark.parametrize("name", ["checkpoint_2.orig", "backup_99", "tmp", ".DS_Store", "notes.txt"])
def test_automatic_loader_looks_at_siblings_so_they_are_strays(automatic_root: Path, name: str) -> None:
    """`load_state()` takes the first number of every name beside it; a name without one is an IndexError."""
    (automatic_root / name).mkdir()
    found = open_checkpoint(automatic_root / "checkpoint_1")
    assert found.strays == (f"../{name}",)


def test_root_strays_are_named(seed_root: Path) -> None:
    for name in ("30500.orig", "step-500_keep", ".DS_Store", "opt_step-10.bak", "opt_step-10_before_edit"):
        (seed_root / name).mkdir()
    (seed_root / "latest").write_text("x")
    strays = {"30500.orig", "step-500_keep", ".DS_Store", "opt_step-10.bak", "opt_step-10_before_edit"}
    assert set(list_root_strays(seed_root)) == strays
    assert [c.path.name for c in list_checkpoints(seed_root)] == ["opt_step-5", "opt_step-10"]


def test_unknown_directory_says_what_was_seen(tmp_path: Path) -> None:
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "a.txt").write_text("x")
    with pytest.raises(UnknownFormat, match=r"it holds a\.txt"):
        open_checkpoint(tmp_path / "thing")
    with pytest.raises(CheckpointNotFound, match="does not exist: beside it are thing"):
        open_checkpoint(tmp_path / "thin")
    assert list_checkpoints(tmp_path / "nowhere") == []
