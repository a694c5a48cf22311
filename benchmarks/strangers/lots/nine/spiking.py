"""Spiking network of snnTorch: leaky neurons with learnable decay, state over time, a checkpoint an epoch."""

import os

import snntorch as snn
import torch
from snntorch import functional, surrogate
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chronicle

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        grad = surrogate.fast_sigmoid(slope=25)
        self.fc1, self.lif1 = nn.Linear(12, 24), snn.Leaky(beta=0.9, spike_grad=grad, learn_beta=True)
        self.fc2, self.lif2 = nn.Linear(24, 3), snn.Leaky(beta=0.8, spike_grad=grad)

    def forward(self, x):
        mem1, mem2, out = self.lif1.init_leaky(), self.lif2.init_leaky(), []
        for _ in range(5):
            spikes, mem1 = self.lif1(self.fc1(x), mem1)
            spikes, mem2 = self.lif2(self.fc2(spikes), mem2)
            out.append(spikes)
        return torch.stack(out)


net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3, betas=(0.9, 0.999))
chronicle.attach("strangers", net, optimizer)  # the line
loss_fn = functional.ce_rate_loss()
x = torch.rand(64, 12)
loader = DataLoader(TensorDataset(x, torch.arange(64) % 3), batch_size=16, shuffle=True)
begin = 0
if os.path.exists("snn.pt"):
    checkpoint = torch.load("snn.pt")
    net.load_state_dict(checkpoint["net"])
    optimizer.load_state_dict(checkpoint["optim"])
    begin = checkpoint["epoch"] + 1
for epoch in range(begin, 10):
    net.train()
    for data, targets in loader:
        loss = loss_fn(net(data), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save({"net": net.state_dict(), "optim": optimizer.state_dict(), "epoch": epoch}, "snn.pt")
