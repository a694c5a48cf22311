"""A network that obeys an equation: collocation points drawn anew, weights of the losses adapted, gradients of gradients."""

import os

import torch
from torch import nn

import chronicle

torch.set_default_dtype(torch.float64)
torch.manual_seed(4)
net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
log_weight = nn.Parameter(torch.zeros(2))
optimizer = torch.optim.Adam([{"params": net.parameters(), "lr": 1e-3}, {"params": [log_weight], "lr": 1e-2, "maximize": True}])
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.8)
chronicle.attach("strangers", net, optimizer, scheduler)  # the line
first = 0
if os.path.exists("pinn.tar"):
    saved = torch.load("pinn.tar", weights_only=False)
    net.load_state_dict(saved["net"])
    log_weight.data.copy_(saved["log_weight"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    first = saved["iteration"] + 1
for iteration in range(first, 36):
    points = torch.rand(32, 2).requires_grad_()
    u = net(points)
    (du,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    (d2u,) = torch.autograd.grad(du[:, 0].sum(), points, create_graph=True)
    inside = (du[:, 1] - 0.1 * d2u[:, 0]).square().mean()
    edge = torch.cat([torch.rand(16, 1), torch.zeros(16, 1)], 1)
    start = (net(edge) - torch.sin(3.14159 * edge[:, :1])).square().mean()
    optimizer.zero_grad()
    (log_weight.exp() * torch.stack([inside, start])).sum().backward()
    optimizer.step()
    scheduler.step()
    if iteration % 5 == 4:
        state = {"net": net.state_dict(), "log_weight": log_weight.data, "optimizer": optimizer.state_dict()}
        torch.save({**state, "scheduler": scheduler.state_dict(), "iteration": iteration}, "pinn.tar")
