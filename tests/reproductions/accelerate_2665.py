"""accelerate #2665: the optimizer moves parameters that the model no longer has."""

import copy
from pathlib import Path

import torch

import chronicle
from tests.reproductions.case import Answer, Case, heard


def launch(run: Path | None) -> tuple[float, float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = copy.deepcopy(model)  # a wrapper that makes the parameters again
    if run is not None:
        chronicle.attach(run, model, optimizer)
    before = float(sum(parameter.detach().sum() for parameter in model.parameters()))
    for _ in range(30):
        x = torch.randn(32, 8)
        (model(x).squeeze() - x.sum(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, float(sum(parameter.detach().sum() for parameter in model.parameters()))


def bare(folder: Path) -> None:
    before, after = launch(None)
    assert before == after


def guarded(folder: Path) -> str:
    run = folder / "logs" / "run"
    return heard(lambda: launch(run), run)


CASE = Case(
    row=39,
    source="accelerate #2665; pytorch-forum 84911; stackoverflow 60335387",
    pain="the optimizer owns parameters that the model does not use",
    without="nothing is learned for the whole run, and nothing says so",
    answer=Answer.NAMED,
    says=("no longer belong to the model",),
    bare=bare,
    guarded=guarded,
)
