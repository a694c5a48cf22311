"""TrainCheck's workloads: training in evaluation mode, which neither loss nor gradient norm shows."""

from pathlib import Path

import torch

import chronicle
from tests.reproductions.case import Answer, Case, heard


def launch(run: Path | None) -> int:
    """Steps that were trained in evaluation mode, because validation does not switch back."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if run is not None:
        chronicle.attach(run, model, optimizer)
    wrong = 0
    for step in range(40):
        x = torch.randn(32, 8)
        (model(x).squeeze() - x.sum(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        wrong += not model.training
        if step == 12:
            model.eval()
            with torch.no_grad():
                model(x)
    return wrong


def bare(folder: Path) -> None:
    assert launch(None) == 27


def guarded(folder: Path) -> str:
    run = folder / "logs" / "run"
    return heard(lambda: launch(run), run)


CASE = Case(
    row=41,
    source="TrainCheck-Evaluation-Workloads, 18 silent errors; this is the family of `eval()` without a way back",
    pain="after the first validation everything is trained without dropout and with frozen statistics",
    without="loss and gradient norm look normal",
    answer=Answer.NAMED,
    says=("(?i)eval",),
    bare=bare,
    guarded=guarded,
)
