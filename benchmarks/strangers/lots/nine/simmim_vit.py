"""SimMIM pretraining with vit-pytorch: patches are masked at random in every forward pass; AdaBelief, warm-up of pytorch_warmup."""

import os

import pytorch_warmup as warmup
import torch
from adabelief_pytorch import AdaBelief
from torch.utils.data import DataLoader, TensorDataset
from vit_pytorch import ViT
from vit_pytorch.simmim import SimMIM

import chronicle

torch.manual_seed(14)
vit = ViT(image_size=16, patch_size=4, num_classes=5, dim=32, depth=2, heads=2, mlp_dim=48, dropout=0.1)
mim = SimMIM(encoder=vit, masking_ratio=0.5)
optimizer = AdaBelief(mim.parameters(), lr=1e-3, eps=1e-16, betas=(0.9, 0.999), weight_decouple=True, rectify=True, print_change_log=False)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
warm = warmup.UntunedLinearWarmup(optimizer)
chronicle.attach("strangers", mim, optimizer, scheduler)  # the line
loader = DataLoader(TensorDataset(torch.rand(48, 3, 16, 16)), batch_size=12, shuffle=True, drop_last=True)
start = 0
if os.path.exists("mim.pt"):
    checkpoint = torch.load("mim.pt", weights_only=False)
    mim.load_state_dict(checkpoint["model"]), optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"]), warm.load_state_dict(checkpoint["warmup"])
    start = checkpoint["epoch"]
for epoch in range(start, 9):
    for (images,) in loader:
        optimizer.zero_grad()
        mim(images).backward()
        optimizer.step()
        with warm.dampening():
            scheduler.step()
    parts = {"model": mim.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**parts, "warmup": warm.state_dict(), "epoch": epoch + 1}, "mim.pt")
