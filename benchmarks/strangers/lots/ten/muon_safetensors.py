"""torch.optim.Muon beside AdamW; weights as safetensors, both optimizers in a file of their own, the position in JSON."""

import json
import os

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import chronicle

torch.manual_seed(41)
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False), nn.Linear(32, 64))
matrices = [model[1].weight, model[3].weight]
others = [p for p in model.parameters() if not any(p is q for q in matrices)]
optimizers = [torch.optim.Muon(matrices, lr=0.02, momentum=0.9), torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95))]
schedulers = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: min(1.0, (step + 1) / 8)) for one in optimizers]
chronicle.attach("strangers", model, optimizers, schedulers)  # the line
tokens = torch.randint(64, (2000,), generator=torch.Generator().manual_seed(0))
step = 0
if os.path.exists("position.json"):
    model.load_state_dict(load_file("model.safetensors"))
    state = torch.load("optimizers.pt", weights_only=False)
    for thing, one in zip([*optimizers, *schedulers], state, strict=True):
        thing.load_state_dict(one)
    step = json.load(open("position.json"))["step"]
while step < 32:
    rows = torch.stack([tokens[(step * 64 + i * 16) % 1900 :][:17] for i in range(4)])
    nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
    for thing in (*optimizers, *schedulers):
        thing.step()
    model.zero_grad()
    step += 1
    if step % 4 == 0:
        save_file(model.state_dict(), "model.safetensors")
        torch.save([thing.state_dict() for thing in (*optimizers, *schedulers)], "optimizers.pt")
        with open("position.json", "w") as file:
            json.dump({"step": step}, file)
