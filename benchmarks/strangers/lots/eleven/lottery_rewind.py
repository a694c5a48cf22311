"""Lottery tickets: rounds of training, magnitude pruning, and weights put back to the beginning; each round has a new optimizer."""

import os

import torch
from torch import nn
from torch.nn.utils import prune

import chronicle

torch.manual_seed(113)
model = nn.Sequential(nn.Linear(9, 36), nn.ReLU(), nn.Linear(36, 3))
for layer in model[::2]:
    prune.identity(layer, "weight")
begin = {name: value.clone() for name, value in model.state_dict().items() if name.endswith(("_orig", "bias"))}


def make():
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [8, 12], 0.2)


optimizer, scheduler = make()
guarded = chronicle.attach("strangers", model, optimizer, scheduler)  # the line
turn, step = 0, 0
if os.path.exists("ticket.pt"):
    state = torch.load("ticket.pt", weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    begin, turn, step = state["begin"], state["turn"], state["step"]
x = torch.randn(128, 9, generator=torch.Generator().manual_seed(3))
while turn < 4:
    while step < 15:
        rows = torch.arange(step * 8, step * 8 + 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), x[rows, :3].argmax(1)).backward()
        optimizer.step()
        scheduler.step()
        step += 1
        if step % 5 == 0:
            names = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            torch.save({**{k: v.state_dict() for k, v in names.items()}, "begin": begin, "turn": turn, "step": step}, "ticket.pt")
    turn, step = turn + 1, 0
    for layer in model[::2]:
        prune.l1_unstructured(layer, "weight", 0.3)
    model.load_state_dict(begin, strict=False)
    optimizer, scheduler = make()
    guarded = chronicle.attach("strangers", model, optimizer, scheduler)
