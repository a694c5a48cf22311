"""Torch's distributed checkpoint without ranks, saved asynchronously, with a Stateful application object and StatefulDataLoader."""

import os

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torchdata.stateful_dataloader import StatefulDataLoader

import chronicle

torch.manual_seed(19)
model = nn.Sequential(nn.Linear(6, 32), nn.SiLU(), nn.RMSNorm(32), nn.Linear(32, 6))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=False)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 40)
run = chronicle.attach("strangers", model, optimizer, scheduler)  # the line


class App(Stateful):
    step = 0

    def state_dict(self):
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optim": moments, "sched": scheduler.state_dict(), "step": self.step, "loader": loader.state_dict()}

    def load_state_dict(self, state):
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        scheduler.load_state_dict(state["sched"]), loader.load_state_dict(state["loader"])
        self.step = state["step"]


rows = [torch.randn(6, generator=torch.Generator().manual_seed(i)) for i in range(64)]
loader, app, pending = StatefulDataLoader(rows, batch_size=8, shuffle=True), App(), None
if os.path.exists("newest.txt"):
    with open("newest.txt") as file:
        dcp.load({"app": app}, checkpoint_id=file.read())
while app.step < 36:
    for x in loader:
        (model(x) - x.flip(-1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        app.step += 1
        if app.step % 5 == 0:
            dcp.save({"app": app}, checkpoint_id=f"ckpt/{app.step}")
            run.saved(f"ckpt/{app.step}")
            with open("newest.txt", "w") as file:
                file.write(f"ckpt/{app.step}")
