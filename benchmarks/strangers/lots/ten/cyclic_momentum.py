"""CyclicLR that cycles the momentum too, gradients of a mixture of two crops, states written by a thread."""

import copy
import os
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chronicle

torch.manual_seed(43)
model = nn.Sequential(nn.Conv1d(2, 8, 3), nn.InstanceNorm1d(8, affine=True), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.95)
scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.08, step_size_up=7, mode="triangular2", base_momentum=0.85, max_momentum=0.95)
x = torch.randn(80, 2, 20, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(x, torch.arange(80) % 3), batch_size=8, shuffle=True)
chronicle.attach("strangers", model, optimizer, scheduler, data=loader)  # the line
epoch, writer = 0, None


def write(state, path):
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


if os.path.exists("cyc.pt"):
    state = torch.load("cyc.pt", weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    epoch = state["epoch"]
while epoch < 6:
    for batch, label in loader:
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(batch[..., :16]), label) + nn.functional.cross_entropy(model(batch[..., 4:]), label)).backward()
        optimizer.step()
        scheduler.step()
    epoch += 1
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state = {**{name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}, "epoch": epoch}
    writer = threading.Thread(target=write, args=(state, "cyc.pt"))
    writer.start()
    writer.join()
