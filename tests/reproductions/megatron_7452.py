"""Megatron-LM #7452: a combination of parallel modes gives another gradient scale; here in the launch that resumes."""

from pathlib import Path

import torch

import chronicle
from tests.reproductions.case import Answer, Case, heard

SAVED_AT, NUM_FIRST = 10, 15


def launch(folder: Path, run: Path | None, *, factor: float = 1.0, resume: bool = False) -> list[float]:
    """Losses. The launch that saves goes on for five steps. `factor`: of the gradients; 1 in the right composition."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if run is not None:
        chronicle.attach(run, model, optimizer)
    if resume:
        state = torch.load(folder / "step-10.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    losses = []
    for step in range(SAVED_AT if resume else 0, 30 if resume else NUM_FIRST):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(x).squeeze() - x.sum(1)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step + 1 == SAVED_AT:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "step-10.pt")
    return losses


def bare(folder: Path) -> None:
    launch(folder, None)
    right = launch(folder, None, resume=True)
    wrong = launch(folder, None, resume=True, factor=1 / 8)
    assert abs(wrong[10] / right[10] - 1) < 0.1  # Adam divides the scale away, so the loss looks as it should


def guarded(folder: Path) -> str:
    run = folder / "logs" / "run"
    launch(folder, run)
    healthy = heard(lambda: launch(folder, run, resume=True))
    assert "REFUSED" not in healthy, healthy
    return heard(lambda: launch(folder, run, resume=True, factor=1 / 8), run)


CASE = Case(
    row=40,
    source="Megatron-LM #7452",
    pain="another gradient scale by a combination of parallel modes, here in the launch that resumes",
    without="Adam hides it; the loss looks normal",
    answer=Answer.REFUSED,
    says=("REFUSED", "M6 gradient"),
    bare=bare,
    guarded=guarded,
)
