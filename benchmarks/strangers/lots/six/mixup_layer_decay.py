"""Fine-tuning of a picture model in the manner of timm: mixup, soft targets, layer decay, an EMA, warm-up by epochs."""

import copy
import math
import os

import numpy as np
import torch
from torch import nn

import chronicle

EPOCHS, WARMUP, LR, DECAY = 10, 2, 4e-3, 0.75
np.random.seed(0)
torch.manual_seed(0)


class Mixup:
    def __init__(self, alpha=0.8, classes=5):
        self.alpha, self.classes, self.enabled = alpha, classes, True

    def __call__(self, x, y):
        lam = np.random.beta(self.alpha, self.alpha) if self.enabled else 1.0
        hot = nn.functional.one_hot(y, self.classes).float()
        return x * lam + x.flip(0) * (1 - lam), hot * lam + hot.flip(0) * (1 - lam)


class ModelEma(nn.Module):
    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for a, b in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            a.copy_(self.decay * a + (1 - self.decay) * b if a.is_floating_point() else b)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.fc, self.drop = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(torch.relu(self.fc(self.norm(x))))


model = nn.ModuleDict({"stem": nn.Linear(48, 16), "layers": nn.Sequential(*[Layer(16) for _ in range(3)]), "head": nn.Linear(16, 5)})


def forward(m, x):
    return m["head"](m["layers"](m["stem"](x.flatten(1))))


groups = []
for i, part in enumerate([model["stem"], *model["layers"], model["head"]]):
    scale = DECAY ** (4 - i)
    groups.append({"params": [p for p in part.parameters() if p.ndim > 1], "weight_decay": 0.05, "lr_scale": scale})
    groups.append({"params": [p for p in part.parameters() if p.ndim <= 1], "weight_decay": 0.0, "lr_scale": scale})
optimizer = torch.optim.AdamW(groups, lr=LR)
ema, mixup = ModelEma(model), Mixup()
x, y = torch.randn(64, 3, 4, 4), torch.arange(64) % 5
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True)
chronicle.attach("strangers", model, optimizer, averages={"ema": ema})  # the line


def adjust_learning_rate(epoch):
    lr = LR * epoch / WARMUP if epoch < WARMUP else LR * 0.5 * (1 + math.cos(math.pi * (epoch - WARMUP) / (EPOCHS - WARMUP)))
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


first = 0
if os.path.exists("checkpoint.pth"):
    ck = torch.load("checkpoint.pth", weights_only=False)
    model.load_state_dict(ck["model"])
    optimizer.load_state_dict(ck["optimizer"])
    ema.load_state_dict(ck["model_ema"])
    first = ck["epoch"] + 1
for epoch in range(first, EPOCHS):
    model.train()
    mixup.enabled = epoch < EPOCHS - 2
    for i, (a, b) in enumerate(loader):
        adjust_learning_rate(i / len(loader) + epoch)
        a, b = mixup(a, b)
        loss = -(b * forward(model, a).log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update(model)
    ck = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "model_ema": ema.state_dict(), "epoch": epoch}
    torch.save(ck, "checkpoint.pth")
