"""An ensemble with torch.func: stacked parameters as plain tensors, vmapped loss, one optimizer over a dict."""

import copy
import os

import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

import chronicle

torch.manual_seed(22)
members = [nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)) for _ in range(4)]
stacked, buffers = stack_module_state(members)
base = copy.deepcopy(members[0]).to("meta")
params = nn.ParameterDict({name.replace(".", "_"): nn.Parameter(value.detach()) for name, value in stacked.items()})
names = dict(zip(params.keys(), stacked.keys(), strict=True))
optimizer = torch.optim.Adam(params.parameters(), lr=3e-3)
chronicle.attach("strangers", params, optimizer)  # the line


def loss_of(weights, x, y):
    return (functional_call(base, weights, (x,)) - y).square().mean()


data = torch.randn(64, 5)
target, step = data.sin().sum(1, keepdim=True), 0
if os.path.exists("ensemble.pt"):
    saved = torch.load("ensemble.pt")
    params.load_state_dict(saved["params"]), optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while step < 36:
    rows = torch.randint(0, 64, (4, 12))
    weights = {names[name]: value for name, value in params.items()}
    losses = vmap(loss_of)(weights, data[rows], target[rows])
    optimizer.zero_grad()
    losses.sum().backward()
    optimizer.step()
    step += 1
    if step % 4 == 0:
        torch.save({"params": params.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "ensemble.pt")
