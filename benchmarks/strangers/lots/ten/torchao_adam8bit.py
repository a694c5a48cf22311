"""torchao's AdamW8bit: moments are tensors of a class of their own; stochastic depth in the model."""

import os

import torch
from torch import nn
from torchao.optim import AdamW8bit

import chronicle

torch.manual_seed(8)


class Residual(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.keep, self.body = keep, nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))

    def forward(self, x):
        return x + self.body(x) if not self.training or torch.rand(()) < self.keep else x


model = nn.Sequential(nn.Linear(32, 128), Residual(0.9), Residual(0.8), nn.Linear(128, 5))
optimizer = AdamW8bit(model.parameters(), lr=1e-3, weight_decay=0.02)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, 12)
chronicle.attach("strangers", model, optimizer, scheduler)  # the line
x = torch.randn(80, 32, generator=torch.Generator().manual_seed(0))
y, step = torch.arange(80) % 5, 0
if os.path.exists("state.pt"):
    state = torch.load("state.pt", weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"])
    step = state["step"]
while step < 34:
    rows = torch.arange(step * 8, step * 8 + 8) % 80
    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    step += 1
    if step % 4 == 0:
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        torch.save({**{k: v.state_dict() for k, v in parts.items()}, "rng": torch.get_rng_state(), "step": step}, "state.pt")
