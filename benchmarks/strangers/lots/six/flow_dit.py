"""Flow matching with a small DiT: logit-normal times, torch_ema, classifier-free dropout of labels, one file for all."""

import os
from glob import glob

import torch
from torch import nn
from torch_ema import ExponentialMovingAverage

import chronicle


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(approximate="tanh"), nn.Linear(2 * width, width))
        self.modulation = nn.Linear(width, 4 * width)
        nn.init.zeros_(self.modulation.weight)

    def forward(self, x, c):
        s1, g1, s2, g2 = self.modulation(c)[:, None].chunk(4, -1)
        h = self.norm(x) * (1 + s1)
        x = x + g1 * self.attn(h, h, h, need_weights=False)[0]
        return x + g2 * self.mlp(self.norm(x) * (1 + s2))


class DiT(nn.Module):
    def __init__(self, width=16, classes=4):
        super().__init__()
        self.patch, self.label, self.time = nn.Linear(4, width), nn.Embedding(classes + 1, width), nn.Linear(1, width)
        self.pos = nn.Parameter(torch.zeros(1, 9, width))
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.final = nn.Linear(width, 4)

    def forward(self, x, t, y):
        drop = torch.rand(len(y)) < 0.1 if self.training else torch.zeros(len(y), dtype=torch.bool)
        c = self.time(t[:, None]) + self.label(torch.where(drop, torch.full_like(y, 4), y))
        x = self.patch(x) + self.pos
        for block in self.blocks:
            x = block(x, c)
        return self.final(x)


torch.manual_seed(0)
model = DiT()
ema = ExponentialMovingAverage(model.parameters(), decay=0.99)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
chronicle.attach("strangers", model, opt, averages={"ema": ema})  # the line
images = torch.randn(64, 9, 4, generator=torch.Generator().manual_seed(1))
labels = torch.arange(64) % 4
loader = torch.utils.data.DataLoader(list(zip(images, labels, strict=True)), batch_size=8, shuffle=True, drop_last=True)
os.makedirs("dit", exist_ok=True)
train_steps = 0
files = sorted(glob("dit/*.pt"))
if files:
    ck = torch.load(files[-1], weights_only=False)
    model.load_state_dict(ck["model"])
    ema.load_state_dict(ck["ema"])
    opt.load_state_dict(ck["opt"])
    train_steps = int(os.path.basename(files[-1]).split(".")[0])
model.train()
while train_steps < 40:
    for x, y in loader:
        t = torch.randn(len(x)).sigmoid()
        noise = torch.randn_like(x)
        mixed = (1 - t)[:, None, None] * x + t[:, None, None] * noise
        loss = (model(mixed, t, y) - (noise - x)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update()
        train_steps += 1
        if train_steps % 5 == 0:
            ck = {"model": model.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict(), "args": {"classes": 4}}
            torch.save(ck, f"dit/{train_steps:07d}.pt")
        if train_steps >= 40:
            break
