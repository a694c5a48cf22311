"""Accelerate on two ranks with batch norm: `save_state` on both, a mid-epoch resume with `skip_first_batches`."""

import os

meeting = f"file://{os.getcwd()}/meet-{os.getpid()}"
rank = 0 if os.fork() else 1  # the launcher of this script: two processes of one program
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
import torch
import torch.distributed as dist
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chronicle

dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
set_seed(18)
accelerator = chronicle.guard(Accelerator(cpu=True))  # the line
model = nn.Sequential(nn.Conv1d(2, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
x = torch.randn(96, 2, 8, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(x, torch.arange(96) % 3), batch_size=8, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
done = 0
if os.path.exists("last.txt"):
    with open("last.txt") as file:
        done = int(file.read())
    accelerator.load_state(f"step_{done}")
epoch, skip = divmod(done, len(loader))
while done < 36:
    loader.set_epoch(epoch)
    for inputs, labels in skip_first_batches(loader, skip) if skip else loader:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        done += 1
        if done % 4 == 0:
            accelerator.save_state(f"step_{done}")
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                with open("last.txt", "w") as file:
                    file.write(str(done))
    epoch, skip = epoch + 1, 0
accelerator.end_training()
