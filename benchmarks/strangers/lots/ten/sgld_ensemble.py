"""Langevin dynamics: three models with an optimizer each, noise on the gradients, the step falls by a power."""

import os

import torch
from torch import nn

import chronicle

torch.manual_seed(47)
models = [nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1)) for _ in range(3)]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.02) for model in models]
chronicle.attach("strangers", models, optimizers)  # the line
x = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
step = 0
if os.path.exists("sgld.pt"):
    state = torch.load("sgld.pt", weights_only=False)
    for thing, one in zip([*models, *optimizers], state["parts"], strict=True):
        thing.load_state_dict(one)
    torch.set_rng_state(state["rng"])
    step = state["step"]
while step < 20:
    for model, optimizer in zip(models, optimizers, strict=True):
        lr = 0.02 * (1 + step) ** -0.33
        for group in optimizer.param_groups:
            group["lr"] = lr
        rows = x[torch.randint(120, (12,))]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(rows), rows.sum(1, keepdim=True)).backward()
        for p in model.parameters():
            p.grad += torch.randn_like(p) * (2 * lr) ** 0.5 * 0.01
        optimizer.step()
    step += 1
    if step % 3 == 0:
        parts = [thing.state_dict() for thing in (*models, *optimizers)]
        torch.save({"parts": parts, "rng": torch.get_rng_state(), "step": step}, "sgld.pt")
