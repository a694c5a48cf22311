"""A mixture of experts balanced without a loss: a bias of each expert is moved by its load after every step."""

import os

import torch
from torch import nn

import chronicle

torch.manual_seed(1)


class Mixture(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 32), nn.SiLU(), nn.Linear(32, width)) for _ in range(experts))
        self.register_buffer("balance", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def forward(self, x):
        scores = self.router(x).sigmoid()
        chosen = (scores + self.balance).topk(2, -1).indices
        gates = scores.gather(-1, chosen)
        gates = gates / gates.sum(-1, keepdim=True)
        if self.training:
            self.load += torch.bincount(chosen.flatten(), minlength=len(self.experts))
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, slots = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(x[rows]) * gates[rows, slots, None])
        return x + out


model = nn.Sequential(nn.Linear(10, 16), Mixture(16, 4), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 5) if s < 30 else 0.1)
chronicle.attach("strangers", model, optimizer, scheduler)  # the line
step = 0
if os.path.exists("moe.pt"):
    saved = torch.load("moe.pt", weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    step = saved["step"]
x = torch.randn(640, 10, generator=torch.Generator().manual_seed(2))
while step < 36:
    inputs = x[(step * 16) % 640 :][:16]
    loss = nn.functional.cross_entropy(model(inputs), (inputs[:, 0] > 0).long())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    with torch.no_grad():
        mixture = model[1]
        mixture.balance += 1e-3 * (mixture.load.mean() - mixture.load).sign()
        mixture.load.zero_()
    step += 1
    if step % 4 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save({**state, "step": step}, "moe.pt")
