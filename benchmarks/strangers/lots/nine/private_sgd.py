"""Differential privacy with Opacus: gradients by sample, Poisson batches, the engine saves the checkpoint."""

import os

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chronicle

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(10, 24), nn.GroupNorm(4, 24), nn.ReLU(), nn.Linear(24, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(96, 10)
loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=12)
engine = PrivacyEngine()
model, optimizer, loader = engine.make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.8, max_grad_norm=1.0
)
chronicle.attach("strangers", model, optimizer)  # the line
epoch = 0
if os.path.exists("private.pt"):
    extra = engine.load_checkpoint(path="private.pt", module=model, optimizer=optimizer)
    epoch = extra["epoch"]
while epoch < 6:
    for data, label in loader:
        if len(data) == 0:
            continue
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data), label).backward()
        optimizer.step()
    epoch += 1
    engine.save_checkpoint(path="private.pt", module=model, optimizer=optimizer, checkpoint_dict={"epoch": epoch})
