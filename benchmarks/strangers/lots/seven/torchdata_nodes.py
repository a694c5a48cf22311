"""torchdata.nodes: two weighted sources, batched, prefetched, and a Loader whose state is in the checkpoint."""

import os

import torch
import torchdata.nodes as tn
from torch import nn

import chronicle

torch.manual_seed(31)


def source(seed, count):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 30, (12,), generator=rng) for _ in range(count)]


def make_loader():
    named = {name: tn.MapStyleWrapper(rows, torch.utils.data.SequentialSampler(rows)) for name, rows in sources.items()}
    mixed = tn.MultiNodeWeightedSampler(named, {"web": 0.7, "code": 0.3}, seed=5)
    batches = tn.Batcher(mixed, batch_size=4)
    return tn.Loader(tn.Prefetcher(tn.ParallelMapper(batches, torch.stack, num_workers=1, method="thread"), prefetch_factor=2))


sources = {"web": source(1, 160), "code": source(2, 80)}
loader = make_loader()
model = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 30))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=10, T_mult=2)
chronicle.attach("strangers", model, optimizer, scheduler)  # the line
step = 0
if os.path.exists("nodes.pt"):
    saved = torch.load("nodes.pt", weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    loader.load_state_dict(saved["loader"])
    step = saved["step"]
for batch in loader:
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    step += 1
    if step % 4 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save({**state, "loader": loader.state_dict(), "step": step}, "nodes.pt.part")
        os.replace("nodes.pt.part", "nodes.pt")
    if step == 36:
        break
