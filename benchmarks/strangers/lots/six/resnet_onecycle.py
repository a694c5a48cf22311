"""A small residual network on pictures: OneCycleLR per batch, label smoothing, bf16 autocast, best and last checkpoints."""

import os

import torch
from torch import nn

import chronicle


class Block(nn.Module):
    def __init__(self, width, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + x)


def accuracy(model, loader):
    model.eval()
    right = total = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum().item()
            total += len(y)
    return right / total


def main():
    torch.manual_seed(3407)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), Block(8), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    x, y = torch.randn(80, 3, 8, 8), torch.randint(4, (80,))
    train = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[:64], y[:64]), 16, shuffle=True, drop_last=True)
    held = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[64:], y[64:]), 16)
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD(
        [{"params": decay, "weight_decay": 5e-4}, {"params": plain, "weight_decay": 0.0}], lr=0.1, momentum=0.9, nesterov=True
    )
    epochs = 9
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, epochs=epochs, steps_per_epoch=len(train))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    chronicle.attach("strangers", model, optimizer, scheduler)  # the line
    start, best = 0, 0.0
    if os.path.isfile("checkpoints/last.pth"):
        ckpt = torch.load("checkpoints/last.pth", map_location="cpu", weights_only=False)
        model.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        scheduler.load_state_dict(ckpt["scheduler"])
        start, best = ckpt["epoch"] + 1, ckpt["best"]
    os.makedirs("checkpoints", exist_ok=True)
    for epoch in range(start, epochs):
        model.train()
        for inputs, labels in train:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = criterion(model(inputs), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
        score = accuracy(model, held)
        ckpt = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "best": max(best, score)}
        ckpt["scheduler"] = scheduler.state_dict()
        torch.save(ckpt, "checkpoints/last.pth")
        if score > best:
            best = score
            torch.save(ckpt, "checkpoints/best.pth")


if __name__ == "__main__":
    main()
