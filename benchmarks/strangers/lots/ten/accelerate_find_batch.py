"""Accelerate's `find_executable_batch_size`: the first sizes run out of memory, everything is built again inside."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chronicle

accelerator = chronicle.guard(Accelerator(cpu=True))  # the line
x = torch.randn(96, 10, generator=torch.Generator().manual_seed(0))


@find_executable_batch_size(starting_batch_size=32)
def train(batch_size):
    accelerator.free_memory()
    set_seed(3)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(x, torch.arange(96) % 3), batch_size=batch_size, shuffle=True)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, 80, 2.0)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if batch_size > 8:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
    done = max((int(name.split("_")[1]) for name in os.listdir(".") if name.startswith("epoch_")), default=-1) + 1
    if done:
        accelerator.load_state(f"epoch_{done - 1}")
    for epoch in range(done, 7):
        for inputs, labels in loader:
            accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.save_state(f"epoch_{epoch}")


train()
