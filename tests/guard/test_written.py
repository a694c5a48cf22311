"""Whether a save holds the weights of memory: an average, or half of a model, is named at the save; nothing else is accused."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chronicle
from chronicle.journal import read_journal
from chronicle.paths import RunPaths


def told(run_dir: Path) -> list[str]:
    entries = read_journal(RunPaths(run_dir)).of_kind("incident")
    return [str(entry.data["text"]) for entry in entries if entry.data.get("kind") == "save-differs"]


def average_of(model: nn.Module) -> nn.Module:
    average = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.mul_(0.99)
    return average


def mixed(model: nn.Module) -> dict[str, torch.Tensor]:
    """The head of another moment."""
    return {**model.state_dict(), "1.weight": model.state_dict()["1.weight"] + 1}


SAVES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "whole": (lambda model: model.state_dict(), ""),
    "compiled names": (lambda model: {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}, ""),
    "with its average": (lambda model: [model.state_dict(), average_of(model).state_dict()], ""),
    "in half precision": (lambda model: {name: value.half() for name, value in model.state_dict().items()}, ""),
    "other things": (lambda model: {"note": "weights are elsewhere"}, ""),
    "average in its place": (lambda model: average_of(model).state_dict(), "4 of 4 sampled weights"),
    "part of another moment": (mixed, "1 of 4 sampled weights (`1.weight`)"),
}


@pytest.mark.parametrize("name", SAVES)
@pytest.mark.parametrize("form", ["file", "directory", "safetensors"])
def test_what_a_save_holds(run_dir: Path, tmp_path: Path, name: str, form: str) -> None:
    made, expected = SAVES[name]
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    run = chronicle.attach(run_dir, model, optimizer)
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    target = tmp_path / "step-2.pt" if form == "file" else tmp_path / "step-2"
    content = made(model)
    if form == "safetensors":
        from safetensors.torch import save_file

        if not isinstance(content, dict) or "note" in content:
            pytest.skip("no tensors by name")
        target.mkdir()
        save_file(content, target / "model.safetensors")
        torch.save(optimizer.state_dict(), target / "optimizer.pt")
    else:
        file = target if form == "file" else target / "model.pt"
        file.parent.mkdir(exist_ok=True)
        torch.save({"model": content, "optimizer": optimizer.state_dict(), "step": 2}, file)
    run.saved(target)
    run.session.sealer.finish()
    if expected:
        (text,) = told(run_dir)
        assert expected in text and "an average was saved in place of the weights" in text
    else:
        assert told(run_dir) == []
    assert not list(read_journal(RunPaths(run_dir)).of_kind("guard.fault"))


def test_the_trainer_of_transformers_is_not_accused(tmp_path: Path, run_dir: Path) -> None:
    pytest.importorskip("transformers")
    from tests.guard.test_transformers import train

    train(tmp_path / "out", run_dir, max_steps=8, resume=False)
    assert (tmp_path / "out" / "checkpoint-6").is_dir() and told(run_dir) == []


@pytest.mark.parametrize("form", ["file", "directory"])
def test_a_copy_that_a_thread_of_the_script_writes_later_is_not_accused(run_dir: Path, tmp_path: Path, form: str) -> None:
    """The training has gone on when the script says that its save is whole."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    run = chronicle.attach(run_dir, model, optimizer)
    for step in range(4):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        if step == 1:
            copied = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    target = tmp_path / "step-2.pt" if form == "file" else tmp_path / "step-2"
    file = target if form == "file" else target / "model.pt"
    file.parent.mkdir(exist_ok=True)
    torch.save(copied, file)
    run.saved(target)
    run.session.sealer.finish()
    assert told(run_dir) == []


def test_a_script_that_always_saves_its_average_is_told_once(run_dir: Path, tmp_path: Path) -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    run = chronicle.attach(run_dir, model, optimizer)
    for step in range(3):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        path = tmp_path / f"step-{step}.pt"
        torch.save({"model": average_of(model).state_dict(), "optimizer": optimizer.state_dict()}, path)
        run.saved(path)
        run.session.sealer.finish()
    assert len(told(run_dir)) == 1
