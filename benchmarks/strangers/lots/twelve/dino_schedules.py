"""Self-distillation: LR, weight decay and momentum come from arrays, the last layer waits, the centre is a buffer, the teacher follows."""

import copy
import os

import numpy as np
import torch
from torch import nn

import chronicle

torch.manual_seed(51)
EPOCHS, PER = 6, 8


def cosine(first, last, warm=0):
    rise = np.linspace(0, first, warm)
    return np.concatenate([rise, last + 0.5 * (first - last) * (1 + np.cos(np.pi * np.arange(EPOCHS * PER - warm) / (EPOCHS * PER - warm)))])


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 12))
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(12, 32, bias=False))
        self.last.parametrizations.weight.original0.data.fill_(1)
        self.last.parametrizations.weight.original0.requires_grad = False

    def forward(self, x):
        return self.last(nn.functional.normalize(self.mlp(x), dim=-1))


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 32))

    def forward(self, student, teacher, temperature):
        aim = ((teacher - self.center) / temperature).softmax(-1).detach()
        loss = -(aim * (student / 0.1).log_softmax(-1)).sum(-1).mean()
        self.center.mul_(0.9).add_(teacher.detach().mean(0, keepdim=True), alpha=0.1)
        return loss


student = nn.Sequential(nn.Linear(10, 24), nn.LayerNorm(24), nn.GELU(), nn.Dropout(0.1), Head())
teacher = copy.deepcopy(student).requires_grad_(False)
loss_function = Loss()
plain = [p for p in student.parameters() if p.requires_grad and p.ndim == 1]
heavy = [p for p in student.parameters() if p.requires_grad and p.ndim > 1]
optimizer = torch.optim.AdamW([{"params": heavy}, {"params": plain, "weight_decay": 0.0}], lr=0.0)
lrs, decays, momenta = cosine(3e-3, 1e-5, warm=PER), cosine(0.04, 0.4), cosine(0.9, 1.0)
temperatures = np.concatenate([np.linspace(0.04, 0.07, 2), np.full(EPOCHS, 0.07)])
rows = torch.randn(PER * 8, 10, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True, drop_last=True)
chronicle.attach("strangers", student, optimizer, data=loader, averages={"teacher": teacher}, objects={"loss": loss_function})  # the line
first = 0
if os.path.exists("dino.pth"):
    state = torch.load("dino.pth", weights_only=False)
    student.load_state_dict(state["student"])
    teacher.load_state_dict(state["teacher"])
    optimizer.load_state_dict(state["optimizer"])
    loss_function.load_state_dict(state["loss"])
    first = state["epoch"]
for epoch in range(first, EPOCHS):
    for number, x in enumerate(loader):
        now = epoch * PER + number
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] = float(lrs[now])
            if index == 0:
                group["weight_decay"] = float(decays[now])
        views = [x + 0.1 * torch.randn_like(x) for _ in range(2)]
        with torch.no_grad():
            aim = teacher(views[0])
        loss = loss_function(student(views[1]), aim, temperatures[epoch])
        optimizer.zero_grad()
        loss.backward()
        for p in student.parameters():
            if p.grad is not None:
                p.grad.mul_((3.0 / (p.grad.norm() + 1e-6)).clamp(max=1.0))
        if epoch < 1:
            for p in student[-1].last.parameters():
                p.grad = None
        optimizer.step()
        with torch.no_grad():
            for held, new in zip(teacher.parameters(), student.parameters(), strict=True):
                held.mul_(momenta[now]).add_((1 - momenta[now]) * new)
    state = {"student": student.state_dict(), "teacher": teacher.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "loss": loss_function.state_dict(), "epoch": epoch + 1}, "dino.pth")
