"""Running statistics that a script computes anew between its load and its first batch, and ones that were never restored."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import chronicle
from chronicle import ResumeRefused
from chronicle.journal import read_journal
from chronicle.paths import RunPaths

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))


def build(run_dir: Path) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    chronicle.attach(str(run_dir), model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    model.train()
    for step in steps:
        model(X[step * 4 : step * 4 + 4]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def first_pass(top: Path) -> dict[str, Any]:
    model, optimizer = build(top / "logs" / "r")
    train(model, optimizer, range(6))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, top / "state.pt")
    train(model, optimizer, range(6, 8))
    return torch.load(top / "state.pt", weights_only=True)


def recomputed(model: nn.Module) -> None:
    update_bn([X[:16], X[16:32]], model)


def moved_on(model: nn.Module) -> None:
    with torch.no_grad():
        for rows in X.split(8):
            model(rows)


def one_look(model: nn.Module) -> None:
    with torch.no_grad():
        model(X[:8])


def resume(top: Path, state: dict[str, Any], after: Callable[[nn.Module], None], *, restored: bool = True) -> dict[str, Any]:
    """The check of the buffers, as the verdict holds it."""
    model, optimizer = build(top / "logs" / "r")
    running = {name: value for name, value in state["model"].items() if "running" in name or "tracked" in name}
    model.load_state_dict({**state["model"], **({} if restored else {n: model.state_dict()[n].clone() for n in running})})
    optimizer.load_state_dict(state["optimizer"])
    model.train()
    after(model)
    train(model, optimizer, range(6, 8))
    checks = [entry.data for entry in read_journal(RunPaths(top / "logs" / "r")).of_kind("guard.verdict")][-1]["checks"]
    return next(check for check in checks if check["name"] == "buffers")


@pytest.mark.parametrize(
    ("after", "outcome", "why"),
    [
        (lambda model: None, "equal", ""),
        (one_look, "noted", "as saved after the load; forward passes without gradients came before the first batch"),
        (moved_on, "noted", "as saved after the load; forward passes without gradients"),
        (recomputed, "not compared", "running statistics were computed anew: 2 forward passes"),
    ],
)
def test_statistics_that_the_script_calibrates_are_no_lost_ones(
    tmp_path: Path, after: Callable[[nn.Module], None], outcome: str, why: str
) -> None:
    found = resume(tmp_path, first_pass(tmp_path), after)
    assert found["outcome"] == outcome
    assert str(found.get("cause") or "").startswith(why)


def test_statistics_that_were_not_restored_are_refused(tmp_path: Path) -> None:
    """After forward passes in training mode they are "not compared": who computes them anew does not restore them."""
    state = first_pass(tmp_path)
    with pytest.raises(ResumeRefused, match="buffers"):
        resume(tmp_path, state, lambda model: None, restored=False)
    assert resume(tmp_path, state, one_look, restored=False)["outcome"] == "not compared"


def test_statistics_after_accelerates_load(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def launch(*, resumed: bool, calibrate: bool = False) -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        torch.manual_seed(0)
        accelerator: Any = chronicle.guard(Accelerator(cpu=True), run_dir=str(tmp_path / "logs" / "r"))
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        if resumed:
            accelerator.load_state(str(tmp_path / "ck"))
        if calibrate:
            recomputed(model)
        train(model, optimizer, range(6, 9) if resumed else range(6))
        if not resumed:
            accelerator.save_state(str(tmp_path / "ck"))
            train(model, optimizer, range(6, 8))
        accelerator.chronicle.sealer.finish()

    launch(resumed=False)
    launch(resumed=True, calibrate=True)
    (data,) = [entry.data for entry in read_journal(RunPaths(tmp_path / "logs" / "r")).of_kind("guard.verdict")][-1:]
    found = next(check for check in data["checks"] if check["name"] == "buffers")
    assert (data["verdict"], found["outcome"]) == ("passed", "noted")
