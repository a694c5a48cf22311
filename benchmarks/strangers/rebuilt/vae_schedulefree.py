"""A variational autoencoder with a schedule-free optimizer: saved in eval mode, epochs seeded and started again."""

import os

import schedulefree
import torch
from torch import nn

import chronicle


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.mean, self.log_variance = nn.Linear(16, 12), nn.Linear(12, 3), nn.Linear(12, 3)
        self.decode = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 16), nn.Sigmoid())

    def forward(self, x):
        hidden = torch.relu(self.encode(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        sample = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decode(sample), mean, log_variance


torch.manual_seed(1)
model = Autoencoder()
optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=2e-3, warmup_steps=6)
chronicle.attach("strangers", model, optimizer)  # the line
data = torch.rand(64, 16)
first = 0
if os.path.exists("vae.pt"):
    saved = torch.load("vae.pt", weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"]
for epoch in range(first, 6):
    order = torch.utils.data.DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(epoch))
    model.train()
    optimizer.train()
    for batch in order:
        optimizer.zero_grad()
        out, mean, log_variance = model(batch)
        error = nn.functional.binary_cross_entropy(out, batch, reduction="sum")
        (error - 0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()).backward()
        optimizer.step()
    model.eval()
    optimizer.eval()  # the averaged weights are what is kept
    with torch.no_grad():
        model(data[:4])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, "vae.pt")
