"""Prodigy: the optimizer finds its own rate, which stands in its groups and moves at every step."""

import os

import torch
from prodigyopt import Prodigy
from torch import nn

import chronicle

torch.manual_seed(47)
model = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Dropout(0.1), nn.Linear(32, 4))
groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01}, {"params": [p for p in model.parameters() if p.ndim == 1]}]
optimizer = Prodigy(groups, lr=1.0, d_coef=2.0, safeguard_warmup=True, use_bias_correction=True)
plan = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
x = torch.randn(120, 8, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :4].argmax(1)), batch_size=12, shuffle=True)
chronicle.attach("strangers", model, optimizer, plan, data=loader)  # the line
step = 0
if os.path.exists("prodigy.pt"):
    state = torch.load("prodigy.pt", weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    plan.load_state_dict(state["plan"])
    step = state["step"]
while step < 60:
    for rows, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), labels).backward()
        optimizer.step()
        plan.step()
        step += 1
        if step % 5 == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "plan": plan.state_dict(), "step": step}, "prodigy.pt")
