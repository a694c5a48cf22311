"""HF Trainer, Lightning, DCP and plain torch checkpoints, each by its real writer: state, edits, defects.

An edit counts as right when the framework's own loader reads the new numbers and nothing else has changed.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from rollback.checkpoint.formats.format import gaps
from rollback.checkpoint.listing import CheckpointState, list_checkpoints, open_checkpoint, read_state
from rollback.checks.verify import verify_checkpoint
from rollback.errors import Incomplete, Severity, UnknownFormat, UnreadableFile
from rollback.files.state_file import read_state_file, write_edited_copy
from rollback.plan.lr import plan_lr_edits
from rollback.plan.request import RollbackRequest
from tests.builders.checkpoints import CheckpointFactory


def halve_lr(path: Path) -> CheckpointState:
    """Plan and make the edits of `--lr-scale 0.5` in place of the originals; the state as it was before."""
    state = read_state(open_checkpoint(path))
    by_file: dict[str, dict[Any, float]] = {}
    for edit in plan_lr_edits(RollbackRequest(step=10, lr_scale=0.5), state, None).edits:
        by_file.setdefault(edit.file, {})[edit.keys] = edit.after
    for name, edits in by_file.items():
        source = state.checkpoint.folder / name
        copy = source.with_name("edited" + source.suffix)
        write_edited_copy(read_state_file(source), edits, copy)
        copy.replace(source)
    return state


def errors(path: Path) -> list[tuple[str, str]]:
    return [(f.check, f.path) for f in verify_checkpoint(open_checkpoint(path)) if f.severity is Severity.ERROR]


# --- transformers


@pytest.fixture
def trainer_root(checkpoints: CheckpointFactory, root: Path) -> Path:
    return checkpoints.framework(root, "trainer", steps=10, save_every=5)


def test_trainer_checkpoint(trainer_root: Path) -> None:
    found = list_checkpoints(trainer_root)
    assert [(c.step, c.step_source, c.format) for c in found] == [
        (5, "name", "transformers"),
        (10, "name", "transformers"),
    ]
    state = read_state(found[0])
    assert state.counters["trainer_state.json:global_step"] == 5
    assert (state.optimizer_step, state.scheduler_unit, state.rng_ranks) == (5, 1, (0,))
    assert state.config["lr_scheduler_type"] == "linear" and state.config["warmup_steps"] == 2
    assert "step 5" in str(state.data["position"])
    scheduler = torch.load(trainer_root / "checkpoint-5" / "scheduler.pt", weights_only=True)
    assert list(state.schedulers[0].state["_last_lr"]) == scheduler["_last_lr"]  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["scheduler.pt", "optimizer.pt"])
def test_trainer_without_scheduler_or_optimizer_is_incomplete(trainer_root: Path, name: str) -> None:
    """The Trainer would load neither, silently: the seed's exp9 in its newest release."""
    (trainer_root / "checkpoint-5" / name).rename(trainer_root / "checkpoint-5" / f"{name}.bak")
    found = errors(trainer_root / "checkpoint-5")
    assert ("F2", name) in found and ("F1", f"{name}.bak") in found


def test_best_model_that_is_not_beside_the_checkpoint_any_more_is_said(trainer_root: Path) -> None:
    """A rollback has moved it away: `load_best_model_at_end` would look for it in vain."""
    path = trainer_root / "checkpoint-10" / "trainer_state.json"
    log = json.loads(path.read_text())
    for name, said in (("checkpoint-5", False), ("checkpoint-15", True)):
        path.write_text(json.dumps({**log, "best_model_checkpoint": f"out/{name}"}))
        notes = read_state(open_checkpoint(trainer_root / "checkpoint-10")).notes
        assert any("best_model_checkpoint" in note and name in note for note in notes) is said


def test_trainer_counter_contradicts_the_name(trainer_root: Path) -> None:
    (trainer_root / "checkpoint-5").rename(trainer_root / "checkpoint-7")
    assert ("F4", "trainer_state.json") in errors(trainer_root / "checkpoint-7")


def test_trainer_state_of_the_whole_run_is_no_checkpoint(trainer_root: Path) -> None:
    """`save_state()` leaves a trainer_state.json beside the checkpoints."""
    (trainer_root / "trainer_state.json").write_text("{}")
    assert len(list_checkpoints(trainer_root)) == 2


# --- lightning


@pytest.fixture
def lightning_root(checkpoints: CheckpointFactory, root: Path) -> Path:
    return checkpoints.framework(root, "lightning", last=True)


def test_lightning_checkpoint(lightning_root: Path) -> None:
    """`last.ckpt` is the same state under another name, and listed once."""
    (found,) = list_checkpoints(lightning_root)
    assert (found.path.name, found.step, found.single_file, found.format) == (
        "epoch=0-step=10.ckpt", 10, True, "lightning",
    )  # fmt: skip
    last = open_checkpoint(lightning_root / "last.ckpt")
    assert (last.step, last.step_source) == (10, "counters")
    state = halve_lr(found.path)
    assert (state.optimizer_step, state.scheduler_unit) == (10, 1)
    assert state.counters["epoch=0-step=10.ckpt:global_step"] == 10
    new = torch.load(found.path, weights_only=True)
    old = torch.load(last.path, weights_only=True)
    for part, field in (("lr_schedulers", "_last_lr"), ("lr_schedulers", "base_lrs")):
        assert new[part][0][field] == [lr / 2 for lr in old[part][0][field]]
    assert (
        new["optimizer_states"][0]["param_groups"][0]["lr"] == old["optimizer_states"][0]["param_groups"][0]["lr"] / 2
    )
    assert torch.equal(new["state_dict"]["layer.weight"], old["state_dict"]["layer.weight"])


# --- DCP


@pytest.fixture
def dcp_path(checkpoints: CheckpointFactory, root: Path) -> Path:
    return checkpoints.framework(root, "dcp") / "step-10"


def test_dcp_state_and_edit_by_its_own_loader(dcp_path: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    state = halve_lr(dcp_path)
    assert (state.checkpoint.format, state.checkpoint.step, state.optimizer_step) == ("dcp", 10, 10)
    assert state.counters == {".metadata:app.train_state.step": 10}
    assert errors(dcp_path) == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(str(dcp_path), str(tmp_path / "whole.pt"))
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)["app"]
    groups = state.optimizers[0].groups
    assert [group["lr"] for group in whole["optim"]["param_groups"]] == [g["lr"] / 2 for g in groups]  # type: ignore[operator]
    assert whole["lr_scheduler"]["base_lrs"] == [5e-4, 2.5e-4] and whole["lr_scheduler"]["last_epoch"] == 10
    assert whole["train_state"]["step"] == 10 and whole["model"]["1.weight"].shape == (1, 8)


def test_dcp_without_its_metadata_was_cut_off(dcp_path: Path) -> None:
    (dcp_path / ".metadata").unlink()
    assert ("F2", ".metadata") in errors(dcp_path)
    with pytest.raises(UnreadableFile):
        read_state(open_checkpoint(dcp_path))
    with pytest.raises(Incomplete, match=r"\.metadata"):
        read_state_file(dcp_path / "__0_0.distcp")


def test_dcp_part_too_short(dcp_path: Path) -> None:
    part = dcp_path / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-2000])
    assert [check for check, _ in errors(dcp_path)] != []


def test_dcp_stray_beside_the_parts(dcp_path: Path) -> None:
    (dcp_path / "__0_0.distcp.orig").write_bytes(b"")
    (dcp_path / ".metadata.tmp").write_bytes(b"")
    assert set(open_checkpoint(dcp_path).strays) == {"__0_0.distcp.orig", ".metadata.tmp"}


# --- plain torch


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_plain_dict_by_what_it_holds(checkpoints: CheckpointFactory, root: Path, legacy: bool) -> None:
    checkpoints.framework(root, "plain", legacy=legacy)
    torch.save({"layer.weight": torch.ones(2)}, root / "weights.pt")
    (found,) = list_checkpoints(root)
    assert (found.path.name, found.step, found.step_source, found.format) == ("ckpt.pt", 10, "counters", "torch")
    before = torch.load(found.path, weights_only=True)
    halve_lr(found.path)
    after = torch.load(found.path, weights_only=True)
    assert after["optimizer"]["param_groups"][0]["lr"] == before["optimizer"]["param_groups"][0]["lr"] / 2
    assert after["scheduler"]["base_lrs"] == [5e-4] and after["step"] == 10
    assert torch.equal(after["model"]["weight"], before["model"]["weight"])


def test_lfs_pointer_is_named_with_the_way_to_fetch_it(root: Path) -> None:
    path = root / "model.pt"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123456\n")
    with pytest.raises(UnknownFormat, match="Git LFS pointer to sha256:4d7a of 123456 bytes") as caught:
        read_state(open_checkpoint(path))
    assert caught.value.remedy == "fetch it with `git lfs pull`"


@pytest.mark.parametrize(
    ("present", "named"),
    [
        ({0, 2}, ["f1"]),
        ({3}, ["f0", "f1", "f2"]),
        ({0, 1}, []),
        (set(), []),
        ({40, 5}, [f"f{n}" for n in range(34) if n != 5]),
    ],
)
def test_gaps_in_numbered_files_are_named_one_by_one_up_to_a_number(present: set[int], named: list[str]) -> None:
    found = list(gaps(present, "f{}".format, lambda number: "why", max(present, default=-1)))
    assert [finding.path for finding in found] == named
    assert all("why" in finding.message for finding in found[:32])
    assert len(found) <= 32 or "the first of 7 more below number 40" in found[-1].message


def test_a_file_called_after_a_huge_number_is_counted_not_reached() -> None:
    """Seen: one empty file of that name took 1.5 GB."""
    found = list(gaps({0, 99_999_999_999}, "random_states_{}.pkl".format, lambda number: "why", 99_999_999_999))
    assert len(found) == 33 and "99999999966 more" in found[-1].message


def test_a_step_that_file_and_name_both_say_outranks_an_optimizer_that_was_made_anew(root: Path) -> None:
    """Else the newest file is taken for an old one, and an older one is handed on. One of the two alone may be an epoch."""
    model = torch.nn.Linear(2, 2)
    for name, step, count in [("step-10.pt", 10, 10), ("step-21.pt", 21, 1), ("mine.pt", 40, 3), ("epoch-7.pt", 90, 4)]:
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(count):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, root / name)
    found = {one.path.name: one.step for one in list_checkpoints(root)}
    assert found == {"step-10.pt": 10, "step-21.pt": 21, "mine.pt": 3, "epoch-7.pt": 4}


@pytest.mark.parametrize(
    ("name", "step", "count", "stepped", "expected", "unit"),
    [
        ("mine.pt", 41, 3, 41, 41, 1),  # the optimizer was made anew: file and scheduler say so
        ("mine.pt", 40, 10, 40, 10, 4),  # the scheduler is stepped for each of four batches
        ("mine.pt", 40, 10, 10, 10, 1),  # the file counts batches
        ("mine.pt", 41, 3, 3, 3, 1),  # the file counts something else
        ("mine.pt", 41, 3, 7, 3, None),
        ("step-41.pt", 41, 1, 41, 41, None),  # made anew, or 41 batches a step: the LRs of the next steps are not foretold
        ("step-41.pt", 41, 3, 41, 41, 1),
    ],
)
def test_the_step_of_a_file_whose_counters_differ(
    name: str, step: int, count: int, stepped: int, expected: int, unit: int | None, root: Path
) -> None:
    """What two say outranks the optimizer, which counts from where it was made; one voice alone may count something else."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(count):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    scheduler.last_epoch = stepped
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(content | {"step": step}, root / name)
    (checkpoint,) = list_checkpoints(root)
    assert (checkpoint.step, read_state(checkpoint).scheduler_unit) == (expected, unit)
