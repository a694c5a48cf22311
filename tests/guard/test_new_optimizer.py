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
from tests.guard.training import start

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


def test_the_next_fold_begins_from_scratch_and_a_kill_in_it_is_no_lost_state(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a launch that saved, another model is a further training; until that one is saved, a resume loads nothing of it."""
    monkeypatch.setenv("CHRONICLE_LAUNCH", "1")
    first_launch(run_dir, tmp_path / "state.pt")
    further = resume(run_dir, None, adam)
    assert "begins a further one" in further["noted"][0]["why"]
    monkeypatch.setenv("CHRONICLE_LAUNCH", "2")
    assert "saved nothing of it" in resume(run_dir, None, adam)["noted"][0]["why"]
    first_launch_again = network(2)
    optimizer = adam(first_launch_again.parameters())
    run = chronicle.attach(run_dir, first_launch_again, optimizer)
    train(first_launch_again, optimizer, 2)
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "second.pt")
    monkeypatch.setenv("CHRONICLE_LAUNCH", "3")
    with pytest.raises(ResumeRefused):
        resume(run_dir, None, adam)
    assert run is not None


def test_a_schedule_of_another_class_takes_over_from_the_one_before(tmp_path: Path, run_dir: Path) -> None:
    """The promise of the first schedule ends where the loop attaches the second one."""

    def phase(model: Any, optimizer: torch.optim.Optimizer, scheduler: Any, num_steps: int) -> Any:
        run = chronicle.attach(run_dir, model, optimizer, scheduler)
        for _ in range(num_steps):
            train(model, optimizer, 1)
            scheduler.step()
        return run

    model = network(0)
    optimizer = adam(model.parameters())
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1, 8)
    assert phase(model, optimizer, warm, 4) is not None
    torch.save({"model": model.state_dict(), "o": optimizer.state_dict(), "s": warm.state_dict()}, tmp_path / "state.pt")
    model = network(1)
    optimizer = adam(model.parameters())
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1, 8)
    run = chronicle.attach(run_dir, model, optimizer, warm)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    for thing, part in ((model, "model"), (optimizer, "o"), (warm, "s")):
        thing.load_state_dict(state[part])
    for _ in range(4):
        train(model, optimizer, 1)
        warm.step()
    second = phase(model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), 4)
    assert run.session.training.retired and not second.session.training.retired
    torch.save(optimizer.state_dict(), tmp_path / "later.pt")
    optimizer.load_state_dict(torch.load(tmp_path / "later.pt", weights_only=True))
    assert second.session.start.expectation.memory is not None


def test_a_step_that_allocates_state_for_a_load_is_no_first_step(tmp_path: Path, run_dir: Path) -> None:
    """torchtnt steps with gradients of zero, and loads into what that made."""
    first_launch(run_dir, tmp_path / "state.pt")
    model = network(1)
    optimizer = adam(model.parameters())
    run = chronicle.attach(run_dir, model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert "chronicle" not in optimizer.state_dict()  # torch's distributed checkpoint would ask the file for it
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, 1)
    verdict = list(read_journal(RunPaths(run_dir)).of_kind("guard.verdict"))[-1].data
    assert [one["name"] for one in verdict["not_compared"]] == ["next batch"]
    assert run is not None


def test_a_fold_that_accelerate_prepares_is_a_further_training(tmp_path: Path, run_dir: Path) -> None:
    launch = start(run_dir)
    launch.train(3)
    launch.save(tmp_path / "checkpoint-3")
    accelerator = launch.accelerator
    accelerator.free_memory()
    model = network(4)
    model, optimizer = accelerator.prepare(model, adam(model.parameters()))
    train(model, optimizer, 2)
    verdict = list(read_journal(RunPaths(run_dir)).of_kind("guard.verdict"))[-1].data
    assert "begins a further one" in verdict["noted"][0]["why"]
    assert accelerator.chronicle.step == 2
