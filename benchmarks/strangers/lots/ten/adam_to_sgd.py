"""Adam first, SGD from the third epoch on: the optimizer is another object, and the checkpoint says which one it holds."""

import os

import torch
from torch import nn

import chronicle

torch.manual_seed(53)
model = nn.Sequential(nn.Linear(9, 30), nn.ELU(), nn.Linear(30, 3))
SWITCH, EPOCHS, STEPS = 3, 7, 6


def make(epoch):
    if epoch < SWITCH:
        return torch.optim.Adam(model.parameters(), lr=2e-3)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


epoch, state = 0, None
if os.path.exists("swats.pt"):
    state = torch.load("swats.pt", weights_only=False)
    epoch = state["epoch"]
optimizer = make(epoch)
run = chronicle.attach("strangers", model, optimizer)  # the line
if state is not None:
    model.load_state_dict(state["model"])
    if state["kind"] == type(optimizer).__name__:
        optimizer.load_state_dict(state["optimizer"])
x = torch.randn(96, 9, generator=torch.Generator().manual_seed(0))
while epoch < EPOCHS:
    if epoch == SWITCH and not isinstance(optimizer, torch.optim.SGD):
        optimizer = make(epoch)
        run = chronicle.attach("strangers", model, optimizer)
    for i in range(STEPS):
        rows = torch.arange(i * 16, i * 16 + 16)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), rows % 3).backward()
        optimizer.step()
    epoch += 1
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "kind": type(optimizer).__name__, "epoch": epoch}, "swats.pt")
