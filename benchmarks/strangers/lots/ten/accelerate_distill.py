"""Accelerate: a frozen teacher, labelled and unlabelled loaders side by side, named checkpoints of which three are kept."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chronicle

set_seed(27)
project = ProjectConfiguration("project", automatic_checkpoint_naming=True, total_limit=3)
accelerator = chronicle.guard(Accelerator(cpu=True, project_config=project, gradient_accumulation_steps=2))  # the line
teacher = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 4)).eval().requires_grad_(False)
student = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
optimizer = torch.optim.NAdam(student.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=60)
x = torch.randn(128, 12, generator=torch.Generator().manual_seed(3))
labelled = DataLoader(TensorDataset(x[:64], torch.arange(64) % 4), batch_size=4, shuffle=True)
unlabelled = DataLoader(TensorDataset(x[64:]), batch_size=8, shuffle=True)
student, teacher, optimizer, scheduler, labelled, unlabelled = accelerator.prepare(
    student, teacher, optimizer, scheduler, labelled, unlabelled
)
done = 0
if os.path.isdir("project/checkpoints"):
    accelerator.load_state()
    done = project.iteration = max(int(name.split("_")[1]) for name in os.listdir("project/checkpoints")) + 1
for epoch in range(done, 12):
    student.train()
    for (inputs, labels), (others,) in zip(labelled, unlabelled, strict=False):
        with accelerator.accumulate(student):
            with torch.no_grad():
                soft = teacher(others).softmax(-1)
            loss = nn.functional.cross_entropy(student(inputs), labels)
            loss = loss + nn.functional.kl_div(student(others).log_softmax(-1), soft, reduction="batchmean")
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.save_state()
