"""Pictures with Kornia's augmentation as the first part of the model, two workers, warm-up by LambdaLR."""

import os

import kornia.augmentation as K
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import chronicle

torch.manual_seed(11)


class Pictures(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return torch.rand(3, 12, 12, generator=generator), i % 4


augment = K.AugmentationSequential(K.RandomHorizontalFlip(p=0.5), K.ColorJitter(0.1, 0.1, 0.1, 0.1, p=0.8), K.RandomErasing(p=0.3), data_keys=["input"])
body = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(body.parameters(), lr=0.05, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
chronicle.attach("strangers", body, optimizer, scheduler)  # the line
loader = DataLoader(Pictures(), batch_size=8, shuffle=True, num_workers=2)
epoch = 0
if os.path.exists("last.ckpt"):
    last = torch.load("last.ckpt")
    body.load_state_dict(last["state_dict"]), optimizer.load_state_dict(last["optimizer"]), scheduler.load_state_dict(last["lr"])
    epoch = last["epoch"]
for epoch in range(epoch, 7):
    body.train()
    for pictures, labels in loader:
        with torch.no_grad():
            pictures = augment(pictures)
        loss = nn.functional.cross_entropy(body(pictures), labels, label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
    torch.save({"state_dict": body.state_dict(), "optimizer": optimizer.state_dict(), "lr": scheduler.state_dict(), "epoch": epoch + 1}, "last.ckpt")
