"""GaLore: gradients are projected to a low rank that is made anew from time to time; its projector lives in the optimizer's state."""

import os

import torch
from galore_torch import GaLoreAdamW
from torch import nn

import chronicle

torch.manual_seed(21)
model = nn.Sequential(nn.Embedding(60, 32), nn.Flatten(), nn.Linear(256, 64), nn.SiLU(), nn.Linear(64, 60))
low = [p for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith("0.")]
rest = [p for p in model.parameters() if not any(p is q for q in low)]
groups = [{"params": rest}, {"params": low, "rank": 8, "update_proj_gap": 5, "scale": 0.25, "proj_type": "std"}]
optimizer = GaLoreAdamW(groups, lr=5e-3)
chronicle.attach("strangers", model, optimizer)  # the line
ids = torch.randint(60, (90, 9), generator=torch.Generator().manual_seed(2))
step = 0
if os.path.exists("galore.pt"):
    state = torch.load("galore.pt", weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while step < 34:
    rows = ids[torch.arange(step * 6, step * 6 + 6) % 90]
    nn.functional.cross_entropy(model(rows[:, :8]), rows[:, 8]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 4 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "galore.pt")
