"""A latent ODE with torchdiffeq: batches are random windows of one trajectory, the LR decays by hand."""

import os

import torch
from torch import nn
from torchdiffeq import odeint

import chronicle

torch.manual_seed(9)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.calls = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)), 0

    def forward(self, t, y):
        self.calls += 1
        return self.net(y**3)


times = torch.linspace(0, 5, 60)
with torch.no_grad():
    truth = odeint(lambda t, y: y**3 @ torch.tensor([[-0.1, 2.0], [-2.0, -0.1]]), torch.tensor([2.0, 0.0]), times, method="rk4")
field = Field()
optimizer = torch.optim.RMSprop(field.parameters(), lr=1e-3)
chronicle.attach("strangers", field, optimizer)  # the line
begin = 1
if os.path.exists("ode.pth"):
    state = torch.load("ode.pth")
    field.load_state_dict(state["func"]), optimizer.load_state_dict(state["opt"])
    begin = state["itr"] + 1
for itr in range(begin, 36):
    if itr % 15 == 0:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    at = torch.randint(0, 50, (6,))
    optimizer.zero_grad()
    out = odeint(field, truth[at], times[:8], method="rk4")
    (out - torch.stack([truth[at + i] for i in range(8)])).abs().mean().backward()
    optimizer.step()
    if itr % 5 == 0:
        torch.save({"func": field.state_dict(), "opt": optimizer.state_dict(), "itr": itr}, "ode.pth")
