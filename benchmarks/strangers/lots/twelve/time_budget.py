"""A speedrun by the clock: the LR falls with the seconds that were trained, over all launches, not with the steps."""

import os
import time

import torch
from torch import nn

import chronicle

BUDGET = 3.0
torch.manual_seed(11)
model = nn.Sequential(nn.Embedding(40, 16), nn.Flatten(), nn.Linear(16 * 6, 64), nn.ReLU(), nn.Linear(64, 40))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
chronicle.attach("strangers", model, optimizer)  # the line
spent, step = 0.0, 0
if os.path.exists("budget.pt"):
    state = torch.load("budget.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    spent, step = state["spent"], state["step"]
while spent < BUDGET:
    began = time.monotonic()
    for group in optimizer.param_groups:
        group["lr"] = 4e-3 * min(1.0, (step + 1) / 5) * max(0.02, 1 - spent / BUDGET)
    ids = torch.randint(40, (32, 7), generator=torch.Generator().manual_seed(step))
    ids[:, 6] = (ids[:, 0] + ids[:, 5]) % 40
    nn.functional.cross_entropy(model(ids[:, :6]), ids[:, 6]).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    time.sleep(0.04)
    spent += time.monotonic() - began
    step += 1
    if step % 5 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "spent": spent, "step": step}, "budget.pt")
