"""Mean teacher: labelled and unlabelled loaders together, noise on the inputs, ema_pytorch's teacher saved beside the student."""

import os
from itertools import cycle

import torch
from ema_pytorch import EMA
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chronicle

torch.manual_seed(23)
student = nn.Sequential(nn.Linear(10, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3))
teacher = EMA(student, beta=0.95, update_after_step=2, update_every=2)
optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
chronicle.attach("strangers", student, optimizer)  # the line
x = torch.randn(96, 10)
labelled = DataLoader(TensorDataset(x[:24], torch.arange(24) % 3), batch_size=8, shuffle=True)
unlabelled = DataLoader(TensorDataset(x[24:]), batch_size=12, shuffle=True)
first = 0
if os.path.exists("mt.pt"):
    saved = torch.load("mt.pt")
    student.load_state_dict(saved["student"]), teacher.load_state_dict(saved["ema"]), optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"]
for epoch in range(first, 6):
    weight = min(1.0, epoch / 4)
    for (rows,), (inputs, labels) in zip(unlabelled, cycle(labelled), strict=False):
        student.train()
        out = student(torch.cat([inputs, rows]) + 0.1 * torch.randn(len(inputs) + len(rows), 10))
        with torch.no_grad():
            wanted = teacher(rows + 0.1 * torch.randn_like(rows)).softmax(-1)
        loss = nn.functional.cross_entropy(out[: len(inputs)], labels) + weight * (out[len(inputs) :].softmax(-1) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        teacher.update()
    student.eval()
    with torch.no_grad():
        student(x)
    torch.save({"student": student.state_dict(), "ema": teacher.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, "mt.pt")
