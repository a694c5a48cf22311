"""Muon for matrices, AdamW for the rest: both step together, each with its own scheduler."""

import os

import torch

import chronicle

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(32, 16), torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 32))
matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and not name.startswith("0.")]
rest = [p for name, p in model.named_parameters() if p.ndim < 2 or name.startswith("0.")]
optimizers = [torch.optim.Muon(matrices, lr=0.02, momentum=0.95), torch.optim.AdamW(rest, lr=3e-3, betas=(0.8, 0.95))]
flat_then_down = torch.optim.lr_scheduler.LambdaLR
schedulers = [flat_then_down(o, lambda step: min(1.0, (40 - step) / 20)) for o in optimizers]
chronicle.attach("strangers", model, optimizers, schedulers)  # the line
step = 0
if os.path.exists("state.pt"):
    saved = torch.load("state.pt", weights_only=False)
    model.load_state_dict(saved["model"])
    for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    for scheduler, state in zip(schedulers, saved["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    step = saved["step"]
while step < 36:
    tokens = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(step))
    torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    share = min(step / 10, 1.0)
    for group in optimizers[0].param_groups:
        group["momentum"] = (1 - share) * 0.85 + share * 0.95  # warmed up by hand, as the record runs do
    for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
        optimizer.step()
        scheduler.step()
    model.zero_grad(set_to_none=True)
    step += 1
    if step % 5 == 0:
        state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step}
        torch.save({**state, "schedulers": [s.state_dict() for s in schedulers]}, "state.pt")
