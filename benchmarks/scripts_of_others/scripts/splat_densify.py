"""Gaussian splatting in small: points are cloned and pruned as it trains, and the optimizer's state is cut and extended with them."""

import os

import torch
from torch import nn

import chronicle

torch.manual_seed(41)


class Splats(nn.Module):
    def __init__(self, count=20):
        super().__init__()
        self.place = nn.Parameter(torch.rand(count, 2))
        self.colour = nn.Parameter(torch.rand(count, 3))
        self.size = nn.Parameter(torch.full((count, 1), -2.0))

    def forward(self, at):
        weight = torch.exp(-(at[:, None] - self.place).square().sum(-1) / self.size.exp().T)
        return weight @ self.colour.sigmoid()


NAMES = {"place": 2e-3, "colour": 1e-2, "size": 5e-3}


def make_optimizer(model):
    groups = [{"params": [getattr(model, name)], "lr": lr, "name": name} for name, lr in NAMES.items()]
    return torch.optim.Adam(groups, lr=0.0, eps=1e-15)


def replace(model, optimizer, pick):
    """`pick` turns old rows into new ones."""
    for group in optimizer.param_groups:
        old = group["params"][0]
        state = optimizer.state.pop(old, None)
        new = nn.Parameter(pick(old.detach(), False))
        if state is not None:
            state["exp_avg"], state["exp_avg_sq"] = pick(state["exp_avg"], True), pick(state["exp_avg_sq"], True)
            optimizer.state[new] = state
        group["params"][0] = new
        setattr(model, group["name"], new)


step, model = 0, Splats()
saved = torch.load("splats.pt") if os.path.exists("splats.pt") else None
if saved:
    model = Splats(len(saved["model"]["place"]))
optimizer = make_optimizer(model)
chronicle.attach("strangers", model, optimizer)  # the line
if saved:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while step < 48:
    for group in optimizer.param_groups:
        if group["name"] == "place":
            group["lr"] = 2e-3 * 0.1 ** (step / 48)
    at = torch.rand(64, 2)
    aim = torch.stack([at[:, 0], at[:, 1], (at[:, 0] * 6).sin().abs()], -1)
    loss = (model(at) - aim).abs().mean()
    loss.backward()
    slope = model.place.grad.norm(dim=-1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    step += 1
    if step % 7 == 0 and step < 40:
        most = slope.topk(3).indices
        replace(model, optimizer, lambda rows, zero, most=most: torch.cat([rows, torch.zeros_like(rows[most]) if zero else rows[most] + 0.01]))
        keep = model.size.detach()[:, 0] > model.size.detach()[:, 0].min()
        replace(model, optimizer, lambda rows, _, keep=keep: rows[keep])
    if step % 5 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "splats.pt")
