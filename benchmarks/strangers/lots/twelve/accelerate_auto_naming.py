"""Accelerate: a stream that rank 0 reads and hands out, checkpoints that name themselves, two of them kept, clipping, bf16."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch import nn

import chronicle


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        draw = torch.Generator().manual_seed(4)
        for _ in range(200):
            row = torch.randn(10, generator=draw)
            yield {"x": row, "y": (row[0] > row[1]).long()}


class Counter:
    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


torch.manual_seed(19)
names = ProjectConfiguration("project", automatic_checkpoint_naming=True, total_limit=2)
loading = DataLoaderConfiguration(dispatch_batches=True, split_batches=True)
accelerator = Accelerator(project_config=names, dataloader_config=loading, mixed_precision="bf16", cpu=True, gradient_accumulation_steps=2)
accelerator = chronicle.guard(accelerator, run_dir=os.environ["CHRONICLE_RUN_DIR"])  # the line
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3, momentum_decay=4e-3)
plan = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 12, 2)
loader = torch.utils.data.DataLoader(Stream(), batch_size=5)
model, optimizer, loader, plan = accelerator.prepare(model, optimizer, loader, plan)
counter = Counter()
accelerator.register_for_checkpointing(counter)
found = sorted(os.listdir("project/checkpoints"), key=lambda name: int(name.split("_")[1])) if os.path.isdir("project/checkpoints") else []
if found:
    accelerator.load_state(f"project/checkpoints/{found[-1]}")
    accelerator.project_configuration.iteration = int(found[-1].split("_")[1]) + 1
while counter.step < 44:
    done = counter.step * 2 % 40
    for batch in accelerator.skip_first_batches(loader, done) if done else loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            plan.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            counter.step += 1
            if counter.step % 4 == 0:
                accelerator.save_state()
