"""pytorch_optimizer: AdEMAMix inside Lookahead, a poly schedule by hand, float64 targets."""

import os

import torch
from pytorch_optimizer import AdEMAMix, Lookahead
from torch import nn

import chronicle

torch.manual_seed(31)
model = nn.Sequential(nn.Linear(10, 40), nn.Mish(), nn.Linear(40, 40), nn.Mish(), nn.Linear(40, 1))
optimizer = Lookahead(AdEMAMix(model.parameters(), lr=2e-3), k=5, alpha=0.5)
chronicle.attach("strangers", model, optimizer)  # the line
x = torch.randn(200, 10, generator=torch.Generator().manual_seed(1))
step = 0
if os.path.exists("look.pt"):
    state = torch.load("look.pt", weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while step < 40:
    for group in optimizer.param_groups:
        group["lr"] = 2e-3 * (1 - step / 60) ** 0.9
    rows = x[torch.arange(step * 10, step * 10 + 10) % 200]
    nn.functional.smooth_l1_loss(model(rows)[:, 0], rows.prod(1).double().float()).backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 3 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "look.pt")
