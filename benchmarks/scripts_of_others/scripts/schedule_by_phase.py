"""Three phases, each with a schedule of another class that is made when the phase begins; the checkpoint says which phase it holds."""

import os

import torch
from torch import nn
from torch.optim import lr_scheduler

import chronicle

torch.manual_seed(131)
model = nn.Sequential(nn.Linear(7, 22), nn.GELU(), nn.Linear(22, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)


def plan(phase):
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = (4e-3, 4e-3, 1e-3)[phase]
    return (
        lambda: lr_scheduler.LinearLR(optimizer, 0.1, 1, 8), lambda: lr_scheduler.CosineAnnealingLR(optimizer, 16, 1e-3),
        lambda: lr_scheduler.ExponentialLR(optimizer, 0.9),
    )[phase]()


phase, step = 0, 0
state = torch.load("phase.pt", weights_only=False) if os.path.exists("phase.pt") else None
if state:
    phase, step = state["phase"], state["step"]
scheduler = plan(phase)
guarded = chronicle.attach("strangers", model, optimizer, scheduler)  # the line
if state:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if state["schedule"] == type(scheduler).__name__:
        scheduler.load_state_dict(state["scheduler"])
while step < 40:
    now = 0 if step < 8 else 1 if step < 24 else 2
    if now != phase:
        phase, scheduler = now, plan(now)
        guarded = chronicle.attach("strangers", model, optimizer, scheduler)
    x = torch.randn(16, 7, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    scheduler.step()
    step += 1
    if step % 4 == 0:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
             "schedule": type(scheduler).__name__, "phase": phase, "step": step}, "phase.pt",
        )
