"""Buffers that a script changes without a step are its own; all others must be as they were saved (`buffers.py`)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chronicle
from chronicle import ResumeRefused
from chronicle.journal import read_journal
from chronicle.paths import RunPaths


class Noisy(nn.Module):
    """A layer with noise that the script draws, a mean that every batch moves, and a count of all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("noise", torch.randn(4))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.norm(self.layer(x)) + self.noise


def nothing(model: Any, step: int) -> None:
    pass


def draw(model: Any, step: int) -> None:
    """Before every batch, in the manner of NoisyNet; another draw in every launch."""
    model.noise.normal_()


def draw_at_three(model: Any, step: int) -> None:
    if step == 3:
        draw(model, step)


def evaluate(model: Any, step: int) -> None:
    if step in (0, 3):  # at the beginning of each launch
        model.eval()
        with torch.no_grad():
            model(torch.randn(3, 4))
        model.train()


def forget(model: Any) -> None:
    model.norm.reset_running_stats()


def launch(top: Path, before: Callable[[Any, int], None], steps: range, save: int = 0, spoil: Any = None) -> dict[str, Any]:
    """Take `steps` and save when `save` of all are done; the verdict of the launch."""
    torch.manual_seed(steps.start)
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    chronicle.attach(str(top / "logs" / "tr"), model, optimizer)
    if steps.start:
        state = torch.load(top / "state.pt", weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if spoil:
            spoil(model)
    for step in steps:
        before(model, step)
        model(torch.randn(6, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == save:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, top / "state.pt")
    return dict(list(read_journal(RunPaths(top / "logs" / "tr")).of_kind("guard.verdict"))[-1].data)


@pytest.mark.parametrize("before", [draw, draw_at_three])
@pytest.mark.parametrize("steps", [range(3), range(5)])  # the launch that saved ended right there, or went on
def test_what_the_script_draws_anew_is_not_compared(before: Any, steps: range, tmp_path: Path) -> None:
    """Drawn once between the save and the next batch, it is known from the launch that went on, and only from that."""
    launch(tmp_path, before, steps, save=3)
    if before is draw_at_three and len(steps) == 3:
        with pytest.raises(ResumeRefused):
            launch(tmp_path, before, range(3, 5))
        return
    verdict = launch(tmp_path, before, range(3, 5))
    assert verdict["verdict"] == "unverified"
    assert any("`noise` between a step and the next batch; the others are as saved" in str(one) for one in verdict["checks"])


@pytest.mark.parametrize("before", [nothing, draw])
def test_lost_statistics_are_refused_beside_noise_too(before: Any, tmp_path: Path) -> None:
    launch(tmp_path, before, range(5), save=3)
    with pytest.raises(ResumeRefused) as refused:
        launch(tmp_path, before, range(3, 5), spoil=forget)
    assert [check.name for check in refused.value.checks if not check.ok] == ["buffers"]


def test_a_resume_learns_on_from_what_was_saved(tmp_path: Path) -> None:
    launch(tmp_path, draw, range(5), save=3)
    launch(tmp_path, draw, range(3, 4), save=4)  # one step: nothing is learnt here
    assert launch(tmp_path, draw, range(4, 6))["verdict"] == "unverified"


def test_a_buffer_that_an_evaluation_moves_is_noted(tmp_path: Path) -> None:
    launch(tmp_path, evaluate, range(3), save=3)
    verdict = launch(tmp_path, evaluate, range(3, 5))
    assert "buffers" in {one["name"] for one in verdict["noted"]}


def test_an_evaluation_does_not_excuse_lost_statistics(tmp_path: Path) -> None:
    def forgets_later(model: Any, step: int) -> None:
        evaluate(model, step)
        if step == 3:
            forget(model)

    launch(tmp_path, evaluate, range(3), save=3)
    with pytest.raises(ResumeRefused, match="buffers"):
        launch(tmp_path, forgets_later, range(3, 5))
