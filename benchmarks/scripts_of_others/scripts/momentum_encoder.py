"""MoCo: the key encoder follows in place before the batch is seen, a queue in a buffer, cosine by hand once an epoch."""

import copy
import math
import os

import torch
from torch import nn
from torch.utils.data import DataLoader

import chronicle

torch.manual_seed(3)


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8))
        self.key = copy.deepcopy(self.query)
        for p in self.key.parameters():
            p.requires_grad = False
        self.register_buffer("queue", nn.functional.normalize(torch.randn(8, 64), dim=0))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self):
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            k.data.mul_(0.99).add_(q.data, alpha=0.01)

    def forward(self, one, two):
        q = nn.functional.normalize(self.query(one), dim=1)
        with torch.no_grad():
            k = nn.functional.normalize(self.key(two), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], 1) / 0.2
        at = int(self.at)
        self.queue[:, at : at + len(k)] = k.T
        self.at[0] = (at + len(k)) % 64
        return logits


model = MoCo()
optimizer = torch.optim.SGD(model.query.parameters(), 0.06, momentum=0.9, weight_decay=1e-4)
chronicle.attach("strangers", model, optimizer)  # the line
first = 0
if os.path.exists("checkpoint_last.pth"):
    saved = torch.load("checkpoint_last.pth")
    first = saved["epoch"]
    model.load_state_dict(saved["state_dict"])
    optimizer.load_state_dict(saved["optimizer"])
rows = torch.randn(48, 12, generator=torch.Generator().manual_seed(5))
for epoch in range(first, 6):
    for group in optimizer.param_groups:
        group["lr"] = 0.03 * (1 + math.cos(math.pi * epoch / 6))
    model.train()
    for x in DataLoader(rows, batch_size=8, shuffle=True, drop_last=True):
        model.follow()
        logits = model(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
        loss = nn.functional.cross_entropy(logits, torch.zeros(8, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save({"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint_last.pth")
