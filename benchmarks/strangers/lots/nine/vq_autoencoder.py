"""An autoencoder with the quantizer of vector-quantize-pytorch: k-means at the first batch, dead codes replaced, codebook by averages."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from vector_quantize_pytorch import ResidualVQ

import chronicle

torch.manual_seed(8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(12, 8), nn.Linear(8, 12)
        self.quantize = ResidualVQ(dim=8, num_quantizers=2, codebook_size=16, kmeans_init=True, kmeans_iters=3, threshold_ema_dead_code=2)

    def forward(self, x):
        quantized, _, commit = self.quantize(self.encode(x)[:, None])
        return self.decode(quantized[:, 0]), commit.sum()


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
chronicle.attach("strangers", model, optimizer)  # the line
loader = DataLoader(TensorDataset(torch.randn(96, 12)), batch_size=24, shuffle=True)
first = 0
if os.path.exists("vq.pt"):
    saved = torch.load("vq.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"]
for epoch in range(first, 9):
    model.train()
    for (x,) in loader:
        out, commit = model(x)
        loss = (out - x).square().mean() + commit
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(torch.randn(24, 12))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, "vq.pt")
