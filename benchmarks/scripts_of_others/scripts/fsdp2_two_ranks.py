"""Two ranks of `fully_shard` with activation checkpointing; asynchronous saves by torch's distributed checkpoints."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import chronicle

meeting = f"file://{os.getcwd()}/meet-{os.getpid()}"
rank = 0 if os.fork() else 1  # the launcher of this script: two processes of one program
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
torch.manual_seed(3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(30, 16), nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 30)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


model = Model()
mesh = init_device_mesh("cpu", (2,))
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, foreach=True)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=12)
run = chronicle.attach("strangers", model, optimizer, scheduler)  # the line
step = 0
done = sorted(int(n) for n in os.listdir("shards") if os.path.exists(f"shards/{n}/.metadata")) if os.path.isdir("shards") else []
if done:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments, "sched": scheduler.state_dict(), "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=f"shards/{done[-1]}")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    scheduler.load_state_dict(state["sched"])
    step = int(state["step"])
data = torch.randint(30, (4000,), generator=torch.Generator().manual_seed(8))
pending, saving = None, dist.new_group(backend="gloo")
while step < 30:
    at = (2 * step + rank) * 52
    batch = data[at : at + 52].view(4, 13)
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    step += 1
    if step % 4 == 0:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments, "sched": scheduler.state_dict(), "step": torch.tensor(step)}
        if pending is not None:
            pending[1].result()
            run.saved(pending[0])
        pending = (f"shards/{step}", dcp.async_save(state, checkpoint_id=f"shards/{step}", process_group=saving))
dist.destroy_process_group()
