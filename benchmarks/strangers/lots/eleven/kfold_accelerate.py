"""Accelerate's cross validation: every fold has a new model and optimizer; a fold's state is saved after each of its epochs."""

import json
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chronicle

set_seed(91)
accelerator = chronicle.guard(Accelerator(cpu=True))  # the line
x = torch.randn(120, 8, generator=torch.Generator().manual_seed(9))
y = (x[:, 0] + x[:, 1] > 0).long()
first, done = 0, 0
if os.path.exists("place.json"):
    first, done = json.load(open("place.json"))
for fold in range(first, 4):
    held = torch.arange(120) % 4 != fold
    model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 18)
    loader = DataLoader(TensorDataset(x[held], y[held]), batch_size=15, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    if done:
        accelerator.load_state("fold")
    for epoch in range(done, 3):
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.save_state("fold")
        json.dump([fold, epoch + 1] if epoch < 2 else [fold + 1, 0], open("place.json", "w"))
    model, optimizer, scheduler, loader = accelerator.free_memory(model, optimizer, scheduler, loader)
    done = 0
