"""Segmentation with segmentation_models_pytorch: an encoder frozen for two epochs, dice and focal losses, polynomial decay."""

import os

import segmentation_models_pytorch as smp
import torch
from torch.utils.data import DataLoader, Dataset

import chronicle


class Shapes(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        rng = torch.Generator().manual_seed(i)
        image = torch.rand(3, 32, 32, generator=rng)
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image, (image.mean(0, keepdim=True) > 0.5).float()


torch.manual_seed(4)
model = smp.Unet("resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(32, 16, 8), classes=1)
dice, focal = smp.losses.DiceLoss("binary"), smp.losses.FocalLoss("binary")
optimizer = torch.optim.Adam(
    [{"params": model.encoder.parameters(), "lr": 1e-4}, {"params": model.decoder.parameters()},
     {"params": model.segmentation_head.parameters()}], lr=1e-3)  # fmt: skip
scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=6, power=0.9)
chronicle.attach("strangers", model, optimizer, scheduler)  # the line
first, best = 0, 1e9
if os.path.exists("last.pth"):
    saved = torch.load("last.pth")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    first, best = saved["epoch"] + 1, saved["best"]
loader = DataLoader(Shapes(), batch_size=4, shuffle=True)
for epoch in range(first, 6):
    model.train()
    for p in model.encoder.parameters():
        p.requires_grad = epoch >= 2
    total = 0.0
    for image, mask in loader:
        out = model(image)
        loss = dice(out, mask) + focal(out, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += float(loss)
    scheduler.step()
    if total < best:
        best = total
        torch.save(model.state_dict(), "best.pth")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**state, "epoch": epoch, "best": best}, "last.pth")
