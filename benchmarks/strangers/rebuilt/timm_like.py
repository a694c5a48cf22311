"""An image trainer whose scheduler is no torch scheduler: stepped with the epoch, and with the number of updates."""

import math
import os

import torch

import chronicle


class Cosine:
    """Sets the rate by itself; its state is what lies in the object."""

    def __init__(self, optimizer, epochs, warmup):
        self.optimizer, self.epochs, self.warmup, self.metric = optimizer, epochs, warmup, None
        self.base_values = [group["lr"] for group in optimizer.param_groups]
        self.update_groups([0.0 for _ in self.base_values])

    def step(self, epoch, metric=None):
        self.metric = metric
        share = epoch / self.warmup if epoch < self.warmup else 0.5 * (1 + math.cos(math.pi * epoch / self.epochs))
        self.update_groups([base * share for base in self.base_values])

    def step_update(self, num_updates, metric=None):
        self.metric = metric  # this one moves by epochs

    def update_groups(self, values):
        for group, value in zip(self.optimizer.param_groups, values, strict=True):
            group["lr"] = value * group.get("lr_scale", 1.0)

    def state_dict(self):
        return {key: value for key, value in self.__dict__.items() if key != "optimizer"}

    def load_state_dict(self, state):
        self.__dict__.update(state)


torch.manual_seed(42)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(144, 5))
groups = [{"params": list(model[:2].parameters()), "lr_scale": 0.5}, {"params": list(model[3].parameters())}]
optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
scheduler = Cosine(optimizer, epochs=8, warmup=2)
chronicle.attach("strangers", model, optimizer, scheduler)  # the line
data = torch.utils.data.TensorDataset(torch.randn(48, 3, 8, 8), torch.arange(48) % 5)
first = updates = 0
if os.path.exists("last.pth.tar"):
    saved = torch.load("last.pth.tar", weights_only=False)
    model.load_state_dict(saved["state_dict"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"] + 1
scheduler.step(first)  # not in the checkpoint: set by the epoch
for epoch in range(first, 8):
    seeded = torch.Generator().manual_seed(42 + epoch)
    for updates, (x, y) in enumerate(torch.utils.data.DataLoader(data, 8, shuffle=True, generator=seeded), epoch * 6 + 1):
        model.train()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y, label_smoothing=0.1).backward()
        optimizer.step()
        scheduler.step_update(num_updates=updates)
    model.eval()
    torch.save({"epoch": epoch, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pth.tar")
    scheduler.step(epoch + 1)
