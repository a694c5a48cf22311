"""FSDP2 in the manner of torchtitan: an application state for DCP, step folders, a lambda schedule, gradient clipping."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import chronicle

dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meet-{os.getpid()}", rank=0, world_size=1)
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (1,))


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self, vocab=40, width=16, depth=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleDict({str(i): Layer(width) for i in range(depth)})
        self.output = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(x)


model = Decoder()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.layers.values():
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 4, max(0.0, 1 - (s - 4) / 36)))


class App(Stateful):
    def __init__(self):
        self.step = 0

    def state_dict(self):
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optim": moments, "sched": scheduler.state_dict(), "step": torch.tensor(self.step)}

    def load_state_dict(self, state):
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        scheduler.load_state_dict(state["sched"])
        self.step = int(state["step"])


app = App()
run = chronicle.attach("strangers", model, optimizer, scheduler)  # the line
done = sorted(int(n[5:]) for n in os.listdir("titan") if os.path.exists(f"titan/{n}/.metadata")) if os.path.isdir("titan") else []
if done:
    dcp.load({"app": app}, checkpoint_id=f"titan/step-{done[-1]}")
data = torch.randint(40, (4000,), generator=torch.Generator().manual_seed(8))
while app.step < 36:
    app.step += 1
    at = (app.step * 4 * 17) % 3900
    batch = data[at : at + 68].view(4, 17)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if app.step % 4 == 0:
        dcp.save({"app": app}, checkpoint_id=f"titan/step-{app.step}")
        run.saved(f"titan/step-{app.step}")
dist.destroy_process_group()
