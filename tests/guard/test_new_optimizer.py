"""A loop that goes on with another optimizer than it saved, and one that lost the state of the same one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import chronicle
from chronicle import ResumeRefused
from chronicle.journal import read_journal
from chronicle.paths import RunPaths

Make = Callable[[Any], torch.optim.Optimizer]


class Lamb(torch.optim.AdamW):
    """An optimizer of a third party: its class is torch's own but for the name."""


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def train(model: Any, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for step in range(num_steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def first_launch(run_dir: Path, path: Path, *, then: Make | None = None) -> None:
    """Adam for five steps and a save; `then` another optimizer goes on in the same process."""
    model = network(0)
    optimizer = adam(model.parameters())
    run = chronicle.attach(run_dir, model, optimizer)
    train(model, optimizer, 5)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    if then is not None:
        optimizer = then(model.parameters())
        run = chronicle.attach(run_dir, model, optimizer)
        train(model, optimizer, 2)
    assert run is not None


def resume(run_dir: Path, path: Path | None, make: Make) -> dict[str, Any]:
    """A second launch that loads the weights alone; its last verdict."""
    model = network(1)
    optimizer = make(model.parameters())
    run = chronicle.attach(run_dir, model, optimizer)
    if path is not None:
        model.load_state_dict(torch.load(path, weights_only=True)["model"])
    train(model, optimizer, 1)
    assert run is not None
    return dict(list(read_journal(RunPaths(run_dir)).of_kind("guard.verdict"))[-1].data)


@pytest.mark.parametrize("make", [sgd, lambda parameters: Lamb(parameters, lr=1e-2)])
def test_another_class_on_the_saved_weights_is_not_verified(
    tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str], make: Make
) -> None:
    first_launch(run_dir, tmp_path / "state.pt")
    verdict = resume(run_dir, tmp_path / "state.pt", make)
    assert (verdict["verdict"], verdict["verified"]) == ("unverified", False)
    assert "the weights are those of step 5" in capsys.readouterr().err


def test_new_optimizer_of_the_same_class_is_allowed_where_the_first_pass_began_one(tmp_path: Path, run_dir: Path) -> None:
    first_launch(run_dir, tmp_path / "state.pt", then=adam)
    assert resume(run_dir, tmp_path / "state.pt", adam)["verdict"] == "unverified"


def test_lost_state_of_the_same_class_is_refused(
    tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first_launch(run_dir, tmp_path / "state.pt")
    with pytest.raises(ResumeRefused):
        resume(run_dir, tmp_path / "state.pt", adam)
    assert "the weights of step 5 were loaded, and the optimizer's state of that step was not" in capsys.readouterr().err


@pytest.mark.parametrize("then", [None, adam])
def test_another_class_on_other_weights_is_a_start_from_scratch(tmp_path: Path, run_dir: Path, then: Make | None) -> None:
    first_launch(run_dir, tmp_path / "state.pt", then=then)
    with pytest.raises(ResumeRefused):
        resume(run_dir, None, sgd)


def test_another_class_over_the_saved_state_is_refused_unless_accepted(tmp_path: Path, run_dir: Path) -> None:
    first_launch(run_dir, tmp_path / "state.pt")

    def go_on(**options: Any) -> None:
        model = network(1)
        optimizer = Lamb(model.parameters(), lr=1e-2, weight_decay=0)
        run = chronicle.attach(run_dir, model, optimizer, **options)
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        train(model, optimizer, 1)
        assert run is not None

    with pytest.raises(ResumeRefused, match="optimizers"):
        go_on()
    go_on(accept_change=dict.fromkeys(("optimizers", "decoupled_weight_decay"), "tried on purpose"))
