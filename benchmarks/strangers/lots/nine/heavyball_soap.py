"""A small language model trained with HeavyBall's SOAP; the checkpoint is written every four steps."""

import os

import heavyball
import torch
from torch import nn

import chronicle

torch.manual_seed(6)
model = nn.Sequential(nn.Embedding(32, 16), nn.Flatten(), nn.Linear(128, 32), nn.GELU(), nn.Linear(32, 32))
optimizer = heavyball.SOAP(model.parameters(), lr=3e-3, weight_decay=0.01, precondition_frequency=2)
chronicle.attach("strangers", model, optimizer)  # the line
text = torch.randint(0, 32, (600,), generator=torch.Generator().manual_seed(0))
step = 0
if os.path.exists("soap.pt"):
    state = torch.load("soap.pt", weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while step < 34:
    at = torch.randint(0, 590, (8,))
    x, y = torch.stack([text[i : i + 8] for i in at]), torch.stack([text[i + 8] for i in at])
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 4 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "soap.pt")
