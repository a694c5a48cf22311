"""Segmentation with a U-Net, GradScaler, accumulation over two batches, clipping after unscaling, cosine with restarts."""

import os
import random

import numpy as np
import torch
from torch import nn

import chronicle

SEED, ACCUMULATE, EPOCHS = 42, 2, 7
random.seed(SEED)
np.random.seed(SEED)
torch.manual_seed(SEED)


class Shapes(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        x = torch.from_numpy(np.random.default_rng(index).normal(size=(1, 16, 16)).astype("float32"))
        mask = (x > 0).float()
        if random.random() < 0.5:
            x, mask = x.flip(-1), mask.flip(-1)
        return x, mask


def double(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU(), nn.Dropout2d(0.05))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.mid, self.up = double(1, 8), double(8, 16), double(24, 8)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        skip = self.down(x)
        low = self.mid(nn.functional.max_pool2d(skip, 2))
        high = nn.functional.interpolate(low, scale_factor=2)
        return self.out(self.up(torch.cat([skip, high], 1)))


def dice(logits, mask):
    p = logits.sigmoid()
    return 1 - (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)


model = UNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3, T_mult=2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
loader = torch.utils.data.DataLoader(Shapes(), batch_size=4, shuffle=True)
run = chronicle.attach("strangers", model, optimizer, scheduler, scaler=scaler)  # the line
first = 0
if os.path.exists("unet.ckpt"):
    checkpoint = torch.load("unet.ckpt", weights_only=True)
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optim_dict"])
    scheduler.load_state_dict(checkpoint["sched_dict"])
    scaler.load_state_dict(checkpoint["scaler"])
    first = checkpoint["epoch"]
for epoch in range(first, EPOCHS):
    model.train()
    optimizer.zero_grad()
    for i, (x, mask) in enumerate(loader):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), mask) + dice(logits.float(), mask)
        scaler.scale(loss / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step(epoch + i / len(loader))
    torch.save(
        {
            "epoch": epoch + 1,
            "state_dict": model.state_dict(),
            "optim_dict": optimizer.state_dict(),
            "sched_dict": scheduler.state_dict(),
            "scaler": scaler.state_dict(),
        },
        "unet.ckpt",
    )
