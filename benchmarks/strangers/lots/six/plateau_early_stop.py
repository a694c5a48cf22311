"""Time series with a TCN: ReduceLROnPlateau, early stopping by patience, the best weights kept in memory and reloaded."""

import copy
import os

import torch
from torch import nn

import chronicle

torch.manual_seed(2024)


class TCN(nn.Module):
    def __init__(self):
        super().__init__()
        conv = [nn.utils.parametrizations.weight_norm(nn.Conv1d(c, 8, 3, padding=d, dilation=d)) for c, d in ((1, 1), (8, 2), (8, 4))]
        self.net = nn.Sequential(*[nn.Sequential(c, nn.ReLU(), nn.Dropout(0.1)) for c in conv])
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.net(x)[:, :, -1])


series = torch.sin(torch.arange(400) * 0.2) + 0.1 * torch.randn(400)
windows = series.unfold(0, 25, 3)
train = torch.utils.data.TensorDataset(windows[:96, None, :24], windows[:96, 24:])
held = windows[96:, None, :24], windows[96:, 24:]
loader = torch.utils.data.DataLoader(train, batch_size=16, shuffle=True)
model = TCN()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", factor=0.3, patience=1, min_lr=1e-5)
chronicle.attach("strangers", model, optimizer, scheduler)  # the line
best, best_state, bad, first = float("inf"), None, 0, 0
if os.path.exists("tcn.pt"):
    ck = torch.load("tcn.pt", weights_only=False)
    model.load_state_dict(ck["model"])
    optimizer.load_state_dict(ck["optimizer"])
    scheduler.load_state_dict(ck["scheduler"])
    best, best_state, bad, first = ck["best"], ck["best_state"], ck["bad"], ck["epoch"] + 1
for epoch in range(first, 9):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        score = nn.functional.mse_loss(model(held[0]), held[1]).item()
    scheduler.step(score)
    bad += 1
    if score < best:
        best, best_state, bad = score, copy.deepcopy(model.state_dict()), 0
    ck = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**ck, "best": best, "best_state": best_state, "bad": bad, "epoch": epoch}, "tcn.pt")
    if bad > 6:
        break
if best_state is not None:
    model.load_state_dict(best_state)
