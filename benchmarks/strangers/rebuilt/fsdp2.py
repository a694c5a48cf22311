"""fully_shard on one process with distributed checkpoints, clipping and a cosine with warm-up."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import chronicle

dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/rendezvous-{os.getpid()}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)) for _ in range(3)])
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 31)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[5])
run = chronicle.attach("strangers", model, optimizer, scheduler)  # the line
saved = sorted(Path("ck").glob("step-*"), key=lambda path: int(path.name[5:])) if os.path.exists("ck") else []
done = [path for path in saved if (path / ".metadata").exists() and (path / "extra.pt").exists()]
step = 0
if done:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=done[-1])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    extra = torch.load(done[-1] / "extra.pt", weights_only=False)
    scheduler.load_state_dict(extra["scheduler"])
    step = extra["step"]
while step < 32:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    (model(x) - x).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    step += 1
    if step % 5 == 0:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"ck/step-{step}")
        torch.save({"scheduler": scheduler.state_dict(), "step": step}, f"ck/step-{step}/extra.pt")
        run.saved(f"ck/step-{step}")
dist.destroy_process_group()
