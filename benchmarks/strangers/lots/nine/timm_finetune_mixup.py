"""timm's model, Mixup, optimizer and PlateauLR by epochs with the EMA of timm; the loop and the checkpoint are the script's own."""

import os

import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import PlateauLRScheduler
from timm.utils import ModelEmaV3
from torch.utils.data import DataLoader, TensorDataset

import chronicle

torch.manual_seed(25)
model = create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=4, drop_path_rate=0.1)
optimizer = create_optimizer_v2(model, opt="nadamw", lr=1e-3, weight_decay=0.05, layer_decay=0.8)
scheduler = PlateauLRScheduler(optimizer, decay_rate=0.5, patience_t=2, warmup_t=1, warmup_lr_init=1e-5)
ema, mix, criterion = ModelEmaV3(model, decay=0.9), Mixup(mixup_alpha=0.4, num_classes=4), SoftTargetCrossEntropy()
chronicle.attach("strangers", model, optimizer, scheduler)  # the line
loader = DataLoader(TensorDataset(torch.rand(40, 3, 32, 32), torch.arange(40) % 4), batch_size=8, shuffle=True)
start = 0
if os.path.exists("timm.pth"):
    saved = torch.load("timm.pth", weights_only=False)
    model.load_state_dict(saved["model"]), optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"]), ema.load_state_dict(saved["ema"])
    start = saved["epoch"] + 1
for epoch in range(start, 7):
    total = 0.0
    for images, labels in loader:
        images, soft = mix(images, labels)
        loss = criterion(model(images), soft)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        total += loss.item()
    scheduler.step(epoch + 1, metric=total)
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "ema": ema.state_dict()}
    torch.save({**parts, "epoch": epoch}, "timm.pth")
