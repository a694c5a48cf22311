"""BYOL with lightly's heads, loss and LARS; the momentum of the target follows a cosine; saved by epochs."""

import copy
import os

import torch
from lightly.loss import NegativeCosineSimilarity
from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.lars import LARS
from lightly.utils.scheduler import CosineWarmupScheduler, cosine_schedule
from torch import nn
from torch.utils.data import DataLoader, Dataset

import chronicle


class TwoViews(Dataset):
    def __init__(self):
        self.x = torch.randn(48, 20, generator=torch.Generator().manual_seed(7))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.1 * torch.randn(20), self.x[i] * (torch.rand(20) > 0.2)


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.projection_head, self.prediction_head = BYOLProjectionHead(32, 32, 16), BYOLPredictionHead(16, 32, 16)
        self.backbone_momentum, self.projection_head_momentum = copy.deepcopy(self.backbone), copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)

    def forward(self, x):
        return self.prediction_head(self.projection_head(self.backbone(x)))

    def forward_momentum(self, x):
        return self.projection_head_momentum(self.backbone_momentum(x)).detach()


EPOCHS = 6
torch.manual_seed(0)
model, criterion = BYOL(), NegativeCosineSimilarity()
loader = DataLoader(TwoViews(), batch_size=8, shuffle=True, drop_last=True)
optimizer = LARS([p for p in model.parameters() if p.requires_grad], lr=0.06, momentum=0.9, weight_decay=1e-6)
scheduler = CosineWarmupScheduler(optimizer, warmup_epochs=6, max_epochs=EPOCHS * len(loader))
chronicle.attach("strangers", model, optimizer, scheduler)  # the line
first = 0
if os.path.exists("byol.ckpt"):
    saved = torch.load("byol.ckpt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    first = saved["epoch"] + 1
for epoch in range(first, EPOCHS):
    momentum = cosine_schedule(epoch, EPOCHS, 0.996, 1)
    for one, two in loader:
        update_momentum(model.backbone, model.backbone_momentum, m=momentum)
        update_momentum(model.projection_head, model.projection_head_momentum, m=momentum)
        loss = 0.5 * (criterion(model(one), model.forward_momentum(two)) + criterion(model(two), model.forward_momentum(one)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**state, "epoch": epoch}, "byol.ckpt")
