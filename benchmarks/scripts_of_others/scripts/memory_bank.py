"""Supervised contrast against a bank: features and labels of earlier batches in buffers, first in, first out."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chronicle

torch.manual_seed(61)


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
        self.register_buffer("bank", torch.randn(64, 8))
        self.register_buffer("labels", torch.arange(64) % 4)
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x, y):
        z = nn.functional.normalize(self.net(x), dim=1)
        logits = z @ nn.functional.normalize(self.bank, dim=1).T / 0.2
        same = (y[:, None] == self.labels[None]).float()
        loss = -(logits.log_softmax(1) * same).sum(1) / same.sum(1).clamp(min=1)
        with torch.no_grad():
            where = (self.place + torch.arange(len(x))) % 64
            self.bank[where], self.labels[where] = z.detach(), y
            self.place += len(x)
        return loss.mean()


model = Contrast()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 6, 2)
x = torch.randn(96, 10, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(x, torch.arange(96) % 4), batch_size=12, shuffle=True, drop_last=True)
chronicle.attach("strangers", model, optimizer, scheduler, data=loader)  # the line
epoch = 0
if os.path.exists("bank.pt"):
    state = torch.load("bank.pt", weights_only=False)
    for name, part in {"model": model, "optimizer": optimizer, "scheduler": scheduler}.items():
        part.load_state_dict(state[name])
    epoch = state["epoch"]
while epoch < 6:
    for batch, label in loader:
        loss = model(batch, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    epoch += 1
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    torch.save({**{name: part.state_dict() for name, part in parts.items()}, "epoch": epoch}, "bank.pt")
