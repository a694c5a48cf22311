"""nanochat, Kimi K2, Marin: Muon and AdamW side by side, and the state of one of the two is lost."""

from pathlib import Path

import torch

import chronicle
from tests.reproductions.case import Answer, Case, heard

LOST = ("first optimizer", "second optimizer", "first scheduler", "second scheduler", "momentum")


def launch(folder: Path, run: Path | None, *, load: bool = False, lost: str = "") -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    matrices, rest = [p for p in model.parameters() if p.ndim == 2], [p for p in model.parameters() if p.ndim != 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1, (step + 1) / 10)) for o in optimizers]
    if run is not None:
        chronicle.attach(run, model, optimizers, schedulers)
    first = 0
    if load:
        saved = torch.load(folder / "step-5.pt", weights_only=False)
        model.load_state_dict(saved["model"])
        for name, part, state in zip(
            LOST, [*optimizers, *schedulers], [*saved["optimizers"], *saved["schedulers"]], strict=False
        ):
            if name != lost:
                part.load_state_dict(state)
        if lost == "momentum":
            for state in optimizers[0].state.values():
                state["momentum_buffer"].zero_()
        first = saved["step"]
    for step in range(first, first + 5):
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    if not load:
        states = {"optimizers": [o.state_dict() for o in optimizers], "schedulers": [s.state_dict() for s in schedulers]}
        torch.save({"model": model.state_dict(), **states, "step": first + 5}, folder / "step-5.pt")
    return [float(parameter.detach().sum()) for parameter in model.parameters()]


def bare(folder: Path) -> None:
    launch(folder, None)
    whole = launch(folder, None, load=True)
    assert all(launch(folder, None, load=True, lost=lost) != whole for lost in LOST)


def guarded(folder: Path) -> str:
    run = folder / "logs" / "run"
    launch(folder, run)
    refused = [lost for lost in LOST if "REFUSED" in heard(lambda lost=lost: launch(folder, run, load=True, lost=lost))]
    healthy = "refused" if "REFUSED" in heard(lambda: launch(folder, run, load=True)) else "passed"
    return f"{len(refused)} of {len(LOST)} lost parts refused: {refused}; healthy: {healthy}"


CASE = Case(
    row=25,
    source="nanochat, Kimi K2, Marin, GLM: Muon with AdamW; Megatron-LM PR #6920",
    pain="two optimizers, and the state of one is not restored",
    without="the loss looks normal",
    answer=Answer.REFUSED,
    says=("5 of 5 lost parts refused", "healthy: passed"),
    bare=bare,
    guarded=guarded,
)
