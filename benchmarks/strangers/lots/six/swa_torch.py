"""Stochastic weight averaging by torch.optim.swa_utils: SWALR from an epoch on, update_bn at the end."""

import os

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

import chronicle

EPOCHS, SWA_START = 10, 4
torch.manual_seed(17)
model = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 2))
swa_model = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 3], gamma=0.5)
swa_scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
x = torch.randn(72, 6, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] * x[:, 1] > 0).long()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=12, shuffle=True)
chronicle.attach("strangers", model, optimizer, [scheduler, swa_scheduler], averages={"swa": swa_model})  # the line
first = 0
if os.path.exists("swa.tar"):
    state = torch.load("swa.tar", weights_only=False)
    model.load_state_dict(state["model"])
    swa_model.load_state_dict(state["swa"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    swa_scheduler.load_state_dict(state["swa_scheduler"])
    first = state["epoch"]
for epoch in range(first, EPOCHS):
    model.train()
    for a, b in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
    if epoch >= SWA_START:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
    torch.save(
        {
            "epoch": epoch + 1,
            "model": model.state_dict(),
            "swa": swa_model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "swa_scheduler": swa_scheduler.state_dict(),
        },
        "swa.tar",
    )
update_bn(loader, swa_model)
