"""Sharpness-aware minimisation: two forward passes a step, the weights moved away and back, statistics of batch norm frozen in the second."""

import os

import torch
from pytorch_optimizer import SAM
from torch import nn

import chronicle

torch.manual_seed(53)
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3))
optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.05, momentum=0.9, weight_decay=5e-4)
plan = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.base_optimizer, 50)
chronicle.attach("strangers", model, optimizer.base_optimizer, plan)  # the line
step = 0
if os.path.exists("sam.pt"):
    state = torch.load("sam.pt", weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.base_optimizer.load_state_dict(state["base"])
    plan.load_state_dict(state["plan"])
    step = state["step"]


def statistics(momentum):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = momentum


while step < 50:
    x = torch.randn(16, 1, 6, 6, generator=torch.Generator().manual_seed(step))
    labels = x[:, 0, :3, 0].argmax(1)
    statistics(0.1)
    nn.functional.cross_entropy(model(x), labels).backward()
    optimizer.first_step(zero_grad=True)
    statistics(0.0)
    nn.functional.cross_entropy(model(x), labels).backward()
    optimizer.second_step(zero_grad=True)
    plan.step()
    step += 1
    if step % 5 == 0:
        torch.save({"model": model.state_dict(), "base": optimizer.base_optimizer.state_dict(), "plan": plan.state_dict(), "step": step}, "sam.pt")
