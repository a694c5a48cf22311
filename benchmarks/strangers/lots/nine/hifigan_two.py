"""A vocoder in the manner of HiFi-GAN: generator with weight norm, discriminator with spectral norm, two schedulers, two files."""

import itertools
import os

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

import chronicle

torch.manual_seed(1234)
generator = nn.Sequential(weight_norm(nn.ConvTranspose1d(4, 8, 4, 2, 1)), nn.LeakyReLU(0.1), weight_norm(nn.Conv1d(8, 1, 5, padding=2)), nn.Tanh())
first = nn.Sequential(nn.utils.spectral_norm(nn.Conv1d(1, 8, 5, 2, 2)), nn.LeakyReLU(0.1), nn.utils.spectral_norm(nn.Conv1d(8, 1, 3, 1, 1)))
second = nn.Sequential(nn.Conv1d(1, 8, 9, 4, 4), nn.BatchNorm1d(8), nn.LeakyReLU(0.1), nn.Conv1d(8, 1, 3, 1, 1))
optim_g = torch.optim.AdamW(generator.parameters(), 2e-4, betas=(0.8, 0.99))
optim_d = torch.optim.AdamW(itertools.chain(first.parameters(), second.parameters()), 2e-4, betas=(0.8, 0.99))
last, steps = -1, 0
both = nn.ModuleDict({"g": generator, "d1": first, "d2": second})
run = chronicle.attach("strangers", both, [optim_g, optim_d])  # the line
if os.path.exists("g.pt") and os.path.exists("do.pt"):
    saved, other = torch.load("g.pt"), torch.load("do.pt")
    generator.load_state_dict(saved["generator"])
    first.load_state_dict(other["mpd"]), second.load_state_dict(other["msd"])
    optim_g.load_state_dict(other["optim_g"]), optim_d.load_state_dict(other["optim_d"])
    steps, last = other["steps"], other["epoch"]
decay_g = torch.optim.lr_scheduler.ExponentialLR(optim_g, gamma=0.98, last_epoch=last)
decay_d = torch.optim.lr_scheduler.ExponentialLR(optim_d, gamma=0.98, last_epoch=last)
loader = DataLoader(TensorDataset(torch.randn(40, 4, 16), torch.randn(40, 1, 32)), batch_size=8, shuffle=True)
for epoch in range(max(0, last), 9):
    for mel, wave in loader:
        fake = generator(mel)
        optim_d.zero_grad()
        loss_d = sum(((1 - d(wave)) ** 2).mean() + (d(fake.detach()) ** 2).mean() for d in (first, second))
        loss_d.backward()
        optim_d.step()
        optim_g.zero_grad()
        loss_g = 45 * (fake - wave).abs().mean() + sum(((1 - d(fake)) ** 2).mean() for d in (first, second))
        loss_g.backward()
        optim_g.step()
        if steps % 4 == 0 and steps:
            torch.save({"generator": generator.state_dict()}, "g.pt")
            parts = {"mpd": first.state_dict(), "msd": second.state_dict(), "optim_g": optim_g.state_dict(), "optim_d": optim_d.state_dict()}
            torch.save({**parts, "steps": steps, "epoch": epoch}, "do.pt")
        steps += 1
    decay_g.step()
    decay_d.step()
