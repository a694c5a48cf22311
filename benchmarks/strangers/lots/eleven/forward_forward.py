"""Hinton's forward-forward, as in pytorch/examples: every layer has its own optimizer and its own loss."""

import os

import torch
from torch import nn

import chronicle

torch.manual_seed(97)


class Layer(nn.Linear):
    def __init__(self, rows, columns):
        super().__init__(rows, columns)
        self.opt = torch.optim.Adam(self.parameters(), lr=0.02)

    def forward(self, x):
        return torch.relu(super().forward(x / (x.norm(2, 1, keepdim=True) + 1e-4)))

    def learn(self, good, bad):
        up, down = self(good).pow(2).mean(1), self(bad).pow(2).mean(1)
        loss = torch.log(1 + torch.exp(torch.cat([2 - up, down - 2]))).mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return self(good).detach(), self(bad).detach()


net = nn.Sequential(Layer(14, 40), Layer(40, 40), Layer(40, 40))
guarded = chronicle.attach("strangers", net, [layer.opt for layer in net])  # the line
epoch = 0
if os.path.exists("ff.pt"):
    state = torch.load("ff.pt", weights_only=False)
    net.load_state_dict(state["net"])
    for layer, held in zip(net, state["opts"], strict=True):
        layer.opt.load_state_dict(held)
    epoch = state["epoch"]
data = torch.randn(96, 12, generator=torch.Generator().manual_seed(1))
label = (data[:, 0] > 0).float().unsqueeze(1)
while epoch < 12:
    for part in range(0, 96, 32):
        x, y = data[part : part + 32], label[part : part + 32]
        good, bad = torch.cat([y, 1 - y, x], 1), torch.cat([1 - y, y, x], 1)
        for layer in net:
            good, bad = layer.learn(good, bad)
    epoch += 1
    torch.save({"net": net.state_dict(), "opts": [layer.opt.state_dict() for layer in net], "epoch": epoch}, "ff.pt")
