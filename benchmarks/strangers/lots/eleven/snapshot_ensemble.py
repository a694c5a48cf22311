"""Snapshot ensembles: warm restarts by fractions of an epoch; a member is kept at the end of every cycle."""

import copy
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chronicle

torch.manual_seed(127)
x = torch.randn(96, 8, generator=torch.Generator().manual_seed(7))
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=12, shuffle=True)
model = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2)
guarded = chronicle.attach("strangers", model, optimizer, scheduler, data=loader)  # the line
epoch, members = 0, []
if os.path.exists("snap.pt"):
    state = torch.load("snap.pt", weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    epoch, members = state["epoch"], state["members"]
while epoch < 8:
    for i, (inputs, labels) in enumerate(loader):
        scheduler.step(epoch + i / len(loader))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    epoch += 1
    if epoch in (2, 6):
        members.append(copy.deepcopy(model.state_dict()))
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "epoch": epoch, "members": members},
        "snap.pt",
    )
