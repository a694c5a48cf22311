"""Poutyne's Experiment: epochs, a restored best model, its own files for weights, optimizer and schedule."""

import torch
from poutyne import Experiment, ExponentialLR
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chronicle

torch.manual_seed(4)
x = torch.randn(120, 12)
rows = TensorDataset(x, (x[:, :3].sum(1) > 0).long())
train, valid = torch.utils.data.random_split(rows, [96, 24], generator=torch.Generator().manual_seed(0))
network = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
optimizer = torch.optim.RMSprop(network.parameters(), lr=2e-3, momentum=0.5)
chronicle.attach("strangers", network, optimizer)  # the line
experiment = Experiment("saving", network, optimizer=optimizer, loss_function="cross_entropy", batch_metrics=["acc"], task="classif")
experiment.train(
    DataLoader(train, batch_size=16, shuffle=True), DataLoader(valid, batch_size=24), epochs=8, lr_schedulers=[ExponentialLR(0.9)],
    progress_options={"coloring": False}, verbose=False,
)
