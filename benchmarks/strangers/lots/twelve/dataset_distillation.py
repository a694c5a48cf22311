"""The trained thing is a data set: a network is drawn anew in every outer step and trained on it for two inner ones."""

import os

import torch
from torch import nn
from torch.func import functional_call

import chronicle

torch.manual_seed(71)


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.pictures = nn.Parameter(torch.randn(9, 12))
        self.log_rate = nn.Parameter(torch.tensor(-2.0))
        self.register_buffer("labels", torch.arange(9) % 3)


distilled = Distilled()
optimizer = torch.optim.Adam([{"params": [distilled.pictures], "lr": 5e-2}, {"params": [distilled.log_rate], "lr": 1e-2}])
fall = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=50, power=1.5)
chronicle.attach("strangers", distilled, optimizer, fall)  # the line
step = 0
if os.path.exists("distilled.pt"):
    state = torch.load("distilled.pt")
    distilled.load_state_dict(state["distilled"])
    optimizer.load_state_dict(state["optimizer"])
    fall.load_state_dict(state["fall"])
    step = state["step"]
while step < 50:
    network = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3))
    weights = dict(network.named_parameters())
    for _ in range(2):
        loss = nn.functional.cross_entropy(functional_call(network, weights, (distilled.pictures,)), distilled.labels)
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {name: w - distilled.log_rate.exp() * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
    x = torch.randn(32, 12)
    outer = nn.functional.cross_entropy(functional_call(network, weights, (x,)), x[:, :3].argmax(1))
    optimizer.zero_grad()
    outer.backward()
    optimizer.step()
    fall.step()
    step += 1
    if step % 6 == 0:
        things = {"distilled": distilled, "optimizer": optimizer, "fall": fall}
        torch.save({**{name: thing.state_dict() for name, thing in things.items()}, "step": step}, "distilled.pt")
