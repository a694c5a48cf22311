"""What a save that was cut leaves: `verify --all` names it, a rollback to an earlier step moves it, its undo brings it back."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from chronicle.cli.main import run
from rollback.checkpoint.listing import list_checkpoints
from rollback.checks.remnants import find_remnants, remnant_findings
from tests.builders.checkpoints import CheckpointFactory

STEPS = (10, 20)
WRITERS: dict[str, Callable[[CheckpointFactory, Path], Path]] = {
    "transformers": lambda made, root: made.framework(root, "trainer", steps=20, save_every=10),
    "accelerate": lambda made, root: made.accelerate(root, automatic=True, save_at=list(STEPS)) / "checkpoints",
    "deepspeed": lambda made, root: made.deepspeed(root, stage=1, processes=1),
    "dcp": lambda made, root: made.framework(root, "dcp"),
    "folder": lambda made, root: _script_directories(root),
    "torch": lambda made, root: _script_files(root),
}


def _state(step: int) -> dict[str, Any]:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4)
    for _ in range(step):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def _script_files(root: Path) -> Path:
    for step in STEPS:
        torch.save(_state(step), root / f"ckpt_{step:06d}.pt")
    return root


def _script_directories(root: Path) -> Path:
    for step in STEPS:
        (root / f"step-{step}").mkdir()
        for name, part in _state(step).items():
            torch.save(part, root / f"step-{step}" / f"{name}.pt")
    return root


def _next_name(name: str) -> str:
    """The name of the save after the newest one."""
    digits = "".join(c for c in name if c.isdigit())
    return name.replace(digits, f"{int(digits) + (1 if len(digits) == 1 else 10):0{len(digits)}d}")


def _cut(path: Path, how: str) -> None:
    files = sorted((f for f in path.rglob("*") if f.is_file()), key=lambda f: f.name) if path.is_dir() else [path]
    if how == "one file" and len(files) > 1:
        kept = next((f for f in files if f.suffix in (".json", ".safetensors")), files[-1])
        for file in files:
            if file != kept:
                file.unlink()
    elif how == "empty" and path.is_dir():
        for file in files:
            file.unlink()
    else:
        largest = max(files, key=lambda f: f.stat().st_size)
        largest.write_bytes(b"" if how == "empty" else largest.read_bytes()[: largest.stat().st_size // 2])


@pytest.mark.parametrize("how", ["half", "one file", "empty"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_save_that_was_cut_is_named_moved_and_brought_back(
    checkpoints: CheckpointFactory, root: Path, writer: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = WRITERS[writer](checkpoints, root)
    newest = list_checkpoints(made)[-1]
    later = made / _next_name(newest.path.name)
    if newest.path.is_dir():
        shutil.copytree(newest.path, later)
    else:
        shutil.copy(newest.path, later)
    _cut(later, how)
    before = _picture(made)
    options = ["--run", "r", "--logs", str(made.parent / "logs"), "--checkpoints", str(made)]

    assert run(["verify", "--all", *options]) == 5
    assert later.name in capsys.readouterr().out
    assert run(["rollback", "--to", str(newest.step), "--yes", *options]) == 0
    assert later.name in capsys.readouterr().out and not later.exists() and newest.path.exists()
    assert run(["verify", "--all", *options]) in (0, 5)
    assert f"{later.name}: " not in capsys.readouterr().out
    assert run(["undo", "--yes", *options]) == 0
    assert _picture(made) == before


def _picture(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else b"" for p in root.rglob("*")}


def test_where_a_later_launch_left_half_of_a_save_an_undo_makes_room(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _script_directories(root)
    shutil.copytree(root / "step-20", root / "step-30")
    before, options = _picture(root), ["--run", "r", "--logs", str(root.parent / "logs"), "--checkpoints", str(root)]
    assert run(["rollback", "--to", "10", "--yes", *options]) == 0
    for name in ("step-20", "step-40"):
        (root / name).mkdir()
    (root / "step-20" / "notes.txt").write_text("nothing that was saved, and in the way all the same")
    assert run(["undo", "--yes", *options]) == 0
    assert "move aside  step-20" in capsys.readouterr().out
    assert _picture(root) == before


def test_parts_of_a_later_save_are_moved_although_each_can_be_read(root: Path) -> None:
    """The optimizer is saved last; a script that takes the newest weights would pair them with an older optimizer."""
    for step in STEPS:
        state = _state(step)
        torch.save(state["optimizer"], root / f"optim_{step}.pt")
        torch.save(state["model"], root / f"model_{step}.pt")
        save_file(state["model"], root / f"ema_{step}.safetensors")
    (root / "optim_20.pt").unlink()
    listed = list_checkpoints(root)
    assert [one.step for one in listed] == [10]
    assert find_remnants(root, listed, listed[0]) == {"model_20.pt": 20, "ema_20.safetensors": 20}
    assert remnant_findings(root, listed) == [], "weights may be kept longer than their optimizer"


def test_what_is_named_alike_and_is_something_else_stays(root: Path) -> None:
    _script_directories(root)
    for step in STEPS:
        torch.save(_state(step), root / f"state_{step}.pt")
        torch.save({"seed": 7}, root / f"rng_{step}_rank1.pt")
    for name in ("step-20", "step-25", "step-2024"):
        (root / name).mkdir(exist_ok=True)
        (root / name / "sample.png").write_bytes(b"a picture of this step")
    (root / "step-30").symlink_to("step-20")
    (root / "step-15").mkdir()
    (root / "step-40").write_text("a file")
    (root / "state_30.txt").write_text("a note")
    (root / "30").mkdir()
    (root / "step-40.bak").mkdir()
    listed = list_checkpoints(root)
    for target in (one for one in listed if one.step == 10):
        assert set(find_remnants(root, listed, target)) <= {"step-15"}
    (directory,) = (one for one in listed if one.path.name == "step-20")
    assert find_remnants(root, listed, directory) == {}
    assert [finding.path for finding in remnant_findings(root, listed)] == ["step-15"]
    (root / "step-2024" / "sample.png").rename(root / "step-2024" / "model.pt.tmp")
    assert find_remnants(root, listed, directory) == {"step-2024": 2024}, "a writer's name for what is not written yet"


def test_a_number_that_is_a_rank_is_no_later_step(root: Path) -> None:
    """The other rank's file holds no state of an optimizer, and can be read: it is of the same save."""
    torch.save(_state(20), root / "state_0.pt")
    torch.save({"seed": 7}, root / "state_1.pt")
    (target,) = list_checkpoints(root)
    assert find_remnants(root, [target], target) == {} and remnant_findings(root, [target]) == []
    (root / "state_1.pt").write_bytes(b"")
    assert find_remnants(root, [target], target) == {"state_1.pt": 21}


@pytest.mark.parametrize(
    ("mine", "others", "found"),
    [
        ("step20-rank0-loss9.pt", ["step20-rank1-loss9.pt", "step10-rank7-loss9.pt", "step30-rank0-loss2.pt"], {2: 30}),
        ("ckpt-step=20.pt", ["ckpt-step=40.pt", "ckpt-step=40-rank1.pt", "ckpt-step=9.pt"], {0: 40}),
        ("epoch=2-run7.pt", ["epoch=4-run7.pt", "epoch=1-run8.pt"], {0: 21}),
        ("epoch=19-step=20.ckpt", ["epoch=20-step=21.ckpt", "epoch=9-step=10.ckpt"], {}),  # its step is in its name
        ("epoch=20-step=20.pt", ["epoch=25-step=25.pt", "epoch=20-step=25.pt"], {0: 25, 1: 25}),
        ("epoch2-rank0.pt", ["epoch2-rank1.pt", "epoch4-rank1.pt"], {1: 21}),
        ("000020.pt", ["000040.pt", "40.pt"], {0: 40, 1: 40}),
        ("model_ep2.pt", ["model_ep4.pt"], {0: 21}),
    ],
)
def test_which_number_tells_when(root: Path, mine: str, others: list[str], found: dict[int, int]) -> None:
    torch.save(_state(20), root / mine)
    for name in others:
        (root / name).write_bytes(b"PK\x03\x04")
    listed = list_checkpoints(root)
    target = next(one for one in listed if one.path.name == mine)
    assert find_remnants(root, listed, target) == {others[place]: step for place, step in found.items()}


def test_one_name_for_the_newest_state_is_named_and_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody knows of which step half of `ckpt.pt` is; a note says that it is there."""
    _script_files(root)
    (root / "ckpt.pt").write_bytes(b"PK\x03\x04")
    (root / "vocab.bin").write_bytes(b"\0\1")
    options = ["--run", "r", "--logs", str(root.parent / "logs"), "--checkpoints", str(root)]
    assert run(["rollback", "--to", "10", "--yes", *options]) == 0
    assert "not recognised as checkpoints: `ckpt.pt`, `vocab.bin`;" in capsys.readouterr().out
    assert (root / "ckpt.pt").exists()


def test_half_of_the_first_save_is_named_where_there_is_no_checkpoint(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "ckpt.pt").write_bytes(b"PK\x03\x04")
    assert run(["verify", "--all", "--run", "r", "--logs", str(root.parent / "logs"), "--checkpoints", str(root)]) == 5
    assert "ckpt.pt" in capsys.readouterr().out
