"""Two ranks of DistributedDataParallel with a DistributedSampler; rank 0 saves alone, all ranks load the file."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import chronicle

meeting = f"file://{os.getcwd()}/meet-{os.getpid()}"
rank = 0 if os.fork() else 1  # the launcher of this script: two processes of one program
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
torch.manual_seed(100)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4], gamma=0.3)
chronicle.attach("strangers", model, optimizer, scheduler)  # the line
x = torch.randn(80, 8, generator=torch.Generator().manual_seed(0))
rows = TensorDataset(x, torch.arange(80) % 3)
sampler = DistributedSampler(rows, shuffle=True, seed=1)
loader = DataLoader(rows, batch_size=8, sampler=sampler)
first = 0
if os.path.exists("snapshot.pt"):
    snapshot = torch.load("snapshot.pt", map_location="cpu")
    model.module.load_state_dict(snapshot["MODEL_STATE"])
    optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
    scheduler.load_state_dict(snapshot["SCHEDULER_STATE"])
    first = snapshot["EPOCHS_RUN"]
torch.manual_seed(1000 + rank + 10 * first)
for epoch in range(first, 7):
    sampler.set_epoch(epoch)
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    scheduler.step()
    if rank == 0:
        state = {"MODEL_STATE": model.module.state_dict(), "OPTIMIZER_STATE": optimizer.state_dict()}
        torch.save({**state, "SCHEDULER_STATE": scheduler.state_dict(), "EPOCHS_RUN": epoch + 1}, "snapshot.pt")
    dist.barrier()
dist.destroy_process_group()
