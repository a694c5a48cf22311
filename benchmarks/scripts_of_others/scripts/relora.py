"""ReLoRA: every ten steps the low-rank part is merged, drawn anew, and most of its moments are set to zero."""

import math
import os

import torch
from torch import nn

import chronicle

torch.manual_seed(95)


class Low(nn.Module):
    def __init__(self, rows, columns, rank=4):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, rows) / math.sqrt(rows), requires_grad=False)
        self.a = nn.Parameter(torch.randn(rank, rows) / rows)
        self.b = nn.Parameter(torch.zeros(columns, rank))

    def forward(self, x):
        return x @ (self.weight + self.b @ self.a).T

    @torch.no_grad()
    def merge(self):
        self.weight += self.b @ self.a
        self.a.normal_(0, 1 / self.a.shape[1])
        self.b.zero_()


model = nn.Sequential(Low(10, 32), nn.GELU(), Low(32, 3))
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.Adam(trained, lr=5e-3)
jagged = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, (n % 10 + 1) / 3) * 0.5 * (1 + math.cos(math.pi * n / 60)))
guarded = chronicle.attach("strangers", model, optimizer, jagged)  # the line
step = 0
if os.path.exists("relora.pt"):
    state = torch.load("relora.pt", weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    jagged.load_state_dict(state["jagged"])
    torch.set_rng_state(state["rng"])
    step = state["step"]
while step < 60:
    x = torch.randn(24, 10)
    nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
    optimizer.step()
    jagged.step()
    optimizer.zero_grad()
    step += 1
    if step % 5 == 0:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "jagged": jagged.state_dict(), "rng": torch.get_rng_state(), "step": step},
            "relora.pt",
        )
    if step % 10 == 0:
        for layer in model[::2]:
            layer.merge()
        for p in trained:
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[p][name].mul_(torch.rand_like(p) > 0.9)
