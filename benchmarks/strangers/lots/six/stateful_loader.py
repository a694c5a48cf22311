"""torchdata's StatefulDataLoader with two workers: saved in the middle of an epoch, the iteration goes on from there."""

import os

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import chronicle

torch.manual_seed(77)


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        row = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return row, row.roll(1)


loader = StatefulDataLoader(Pairs(), batch_size=4, shuffle=True, num_workers=2)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 8))
optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=60, power=2.0)
chronicle.attach("strangers", model, optimizer, scheduler, data=loader)  # the line
epoch = step = 0
if os.path.exists("ck.pt"):
    ck = torch.load("ck.pt", weights_only=False)
    model.load_state_dict(ck["model"])
    optimizer.load_state_dict(ck["optimizer"])
    scheduler.load_state_dict(ck["scheduler"])
    loader.load_state_dict(ck["loader"])
    epoch, step = ck["epoch"], ck["step"]
    torch.set_rng_state(ck["rng"])
while step < 48:
    for a, b in loader:
        optimizer.zero_grad()
        nn.functional.smooth_l1_loss(model(a), b).backward()
        optimizer.step()
        scheduler.step()
        step += 1
        if step % 5 == 0:
            ck = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
            ck |= {"loader": loader.state_dict(), "epoch": epoch, "step": step, "rng": torch.get_rng_state()}
            torch.save(ck, "ck.tmp")
            os.replace("ck.tmp", "ck.pt")
        if step >= 48:
            break
    epoch += 1
