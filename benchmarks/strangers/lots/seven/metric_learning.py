"""pytorch-metric-learning: proxies with an optimizer of their own, a miner, balanced batches drawn without a seed."""

import os

import torch
from pytorch_metric_learning import distances, losses, miners, samplers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chronicle

labels = torch.arange(80) % 8
x = torch.randn(80, 16, generator=torch.Generator().manual_seed(3)) + labels[:, None]
sampler = samplers.MPerClassSampler(labels, m=4, batch_size=16, length_before_new_iter=80)
loader = DataLoader(TensorDataset(x, labels), batch_size=16, sampler=sampler)
trunk = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8))
loss_func = losses.ProxyAnchorLoss(num_classes=8, embedding_size=8)
triplets = losses.TripletMarginLoss(distance=distances.CosineSimilarity())
miner = miners.MultiSimilarityMiner(epsilon=0.1)
optimizer = torch.optim.AdamW(trunk.parameters(), lr=1e-3)
loss_optimizer = torch.optim.SGD(loss_func.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
both = nn.ModuleDict({"trunk": trunk, "loss": loss_func})
chronicle.attach("strangers", both, [optimizer, loss_optimizer], scheduler)  # the line
first = 0
if os.path.exists("metric.pt"):
    saved = torch.load("metric.pt", weights_only=False)
    trunk.load_state_dict(saved["trunk"])
    loss_func.load_state_dict(saved["loss_func"])
    optimizer.load_state_dict(saved["optimizer"])
    loss_optimizer.load_state_dict(saved["loss_optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    first = saved["epoch"] + 1
for epoch in range(first, 6):
    trunk.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss_optimizer.zero_grad()
        out = trunk(data)
        loss = loss_func(out, target) + 0.5 * triplets(out, target, miner(out, target))
        loss.backward()
        optimizer.step()
        loss_optimizer.step()
    scheduler.step()
    state = {"trunk": trunk.state_dict(), "loss_func": loss_func.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"loss_optimizer": loss_optimizer.state_dict(), "scheduler": scheduler.state_dict(), "epoch": epoch}
    torch.save(state, "metric.pt")
