"""The tetris of e3nn: an equivariant network, full batches, a checkpoint every third step."""

import os

import torch
from e3nn import o3
from e3nn.nn import FullyConnectedNet
from torch import nn

import chronicle

torch.manual_seed(12)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.sh = o3.Irreps.spherical_harmonics(2)
        self.product = o3.FullyConnectedTensorProduct("0e", self.sh, "8x0e + 2x1o", shared_weights=False)
        self.weights = FullyConnectedNet([3, 16, self.product.weight_numel], torch.relu)
        self.head = o3.Linear("8x0e + 2x1o", "4x0e")

    def forward(self, positions):
        rel = positions[:, :, None] - positions[:, None]
        sh = o3.spherical_harmonics(self.sh, rel, normalize=True, normalization="component")
        length = rel.norm(dim=-1)
        basis = torch.stack([(-((length - c) ** 2)).exp() for c in (0.5, 1.0, 1.5)], -1)
        out = self.product(torch.ones_like(length)[..., None], sh, self.weights(basis))
        return self.head(out.mean((1, 2)))


model = Convolution()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
chronicle.attach("strangers", model, optimizer, scheduler)  # the line
positions = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(0))
labels, step = torch.arange(8) % 4, 0
if os.path.exists("tetris.pt"):
    state = torch.load("tetris.pt", weights_only=False)
    model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"]), scheduler.load_state_dict(state["scheduler"])
    step = state["step"]
while step < 32:
    rotation = o3.rand_matrix()
    loss = nn.functional.cross_entropy(model(positions @ rotation.T), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step(loss.item())
    step += 1
    if step % 3 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "step": step}, "tetris.pt")
