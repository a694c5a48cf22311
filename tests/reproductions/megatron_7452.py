"""Megatron-LM #7452: parallel composition gives another gradient scale; here ranks that average what was to be summed."""

from pathlib import Path

import torch

import chronicle
from tests.reproductions.case import Answer, Case, heard


def launch(run: Path | None, *, wrong_from: int = 10**9) -> list[float]:
    """Gradient norms of 30 steps; from `wrong_from` on, the gradients lose a factor of eight."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if run is not None:
        chronicle.attach(run, model, optimizer)
    norms = []
    for step in range(30):
        x = torch.randn(32, 8)
        (model(x).squeeze() - x.sum(1)).square().mean().backward()
        if step >= wrong_from:
            for parameter in model.parameters():
                parameter.grad.div_(8)
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def bare(folder: Path) -> None:
    right, wrong = launch(None), launch(None, wrong_from=15)
    assert wrong[20] < 0.3 * right[20]


def guarded(folder: Path) -> str:
    run = folder / "logs" / "run"
    return heard(lambda: launch(run, wrong_from=15), run)


CASE = Case(
    row=40,
    source="Megatron-LM #7452",
    pain="another gradient scale by a combination of parallel modes",
    without="Adam hides it; the loss looks normal",
    answer=Answer.NAMED,
    says=("(?i)gradient",),
    bare=bare,
    guarded=guarded,
    waits_for="nothing compares the size of gradients between steps; the log's gradient norm is all there is",
)
