"""A field on a grid that is made finer twice: new parameters, a new optimizer, rates that begin anew and then decay."""

import os

import torch
from torch import nn

import chronicle

torch.manual_seed(61)


class Field(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.grid = nn.Parameter(0.1 * torch.randn(1, 4, size, size))
        self.mlp = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))

    def upsample(self, size):
        self.grid = nn.Parameter(nn.functional.interpolate(self.grid.detach(), (size, size), mode="bilinear", align_corners=True))

    def forward(self, at):
        return self.mlp(nn.functional.grid_sample(self.grid, at[None, None], align_corners=True)[0, :, 0].T)


def make_optimizer(field):
    return torch.optim.Adam([{"params": [field.grid], "lr": 2e-2}, {"params": field.mlp.parameters(), "lr": 2e-3}], betas=(0.9, 0.99))


UPSAMPLE, DECAY = {14: 12, 26: 16}, 0.1 ** (1 / 40)
saved = torch.load("field.pt") if os.path.exists("field.pt") else None
field = Field(saved["size"] if saved else 8)
optimizer = make_optimizer(field)
chronicle.attach("strangers", field, optimizer)  # the line
step = 0
if saved:
    field.load_state_dict(saved["field"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while step < 44:
    at = torch.rand(48, 2) * 2 - 1
    aim = torch.stack([at[:, 0].sin(), at[:, 1].cos(), at.prod(-1)], -1)
    loss = (field(at) - aim).square().mean() + 1e-4 * field.grid.abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] *= DECAY
    step += 1
    if step in UPSAMPLE:
        field.upsample(UPSAMPLE[step])
        optimizer = make_optimizer(field)
        chronicle.attach("strangers", field, optimizer)  # the line again, for the new optimizer
    if step % 4 == 0:
        torch.save({"field": field.state_dict(), "optimizer": optimizer.state_dict(), "size": field.grid.shape[-1], "step": step}, "field.pt")
