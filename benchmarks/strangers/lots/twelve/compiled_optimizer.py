"""A compiled optimizer step with the LR as a tensor, a scheduler on it, and micro-batches."""

import glob
import os

import torch
from torch import nn

import chronicle

torch.manual_seed(81)
model = nn.Sequential(nn.Embedding(50, 24), nn.LSTM(24, 24, batch_first=True))
head = nn.Linear(24, 50)
net = nn.ModuleDict({"body": model, "head": head})
optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(3e-3), weight_decay=0.05, foreach=False)
warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, 6)
fall = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
plan = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, fall], [6])
chronicle.attach("strangers", net, optimizer, plan, accumulation=2)  # the line


@torch.compile(backend="eager")
def move():
    optimizer.step()


step = 0
for name in sorted(glob.glob("ckpt_*.pt"), key=lambda one: int(one[5:-3]))[-1:]:
    state = torch.load(name)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    plan.load_state_dict(state["plan"])
    step = state["step"]
while step < 40:
    for micro in range(2):
        ids = torch.randint(50, (8, 9), generator=torch.Generator().manual_seed(2 * step + micro))
        out, _ = net["body"](ids[:, :-1])
        (nn.functional.cross_entropy(net["head"](out).flatten(0, 1), ids[:, 1:].flatten()) / 2).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    move()
    optimizer.zero_grad()
    plan.step()
    step += 1
    if step % 5 == 0:
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "plan": plan.state_dict(), "step": step}, f"ckpt_{step}.pt")
        for old in glob.glob("ckpt_*.pt"):
            if int(old[5:-3]) < step - 10:
                os.remove(old)
