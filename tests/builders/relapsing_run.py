"""A tiny run under Accelerate whose data turn bad for good at a step: `relapsing_run.py STEP`. No rollback helps against it."""

import random
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator

import chronicle

BAD_FROM = int(sys.argv[1])
STEPS, SAVE_EVERY, SAVED_BEFORE, WATCHED = BAD_FROM + 1_000, 50, 1_000, 0.02

accelerator = chronicle.guard(Accelerator(cpu=True, log_with="chronicle"))
model = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.register_for_checkpointing(scheduler)
accelerator.init_trackers("tiny")
saved = {int(path.name.rpartition("-")[2]): path for path in Path("checkpoints").glob("opt_step-*")}
first = max(saved, default=0)
if saved:
    accelerator.load_state(str(saved[first]))
for step in range(first + 1, STEPS + 1):
    noise = random.Random(step)
    target = 0.01 * noise.gauss(0.0, 1.0) + max(0.0, 0.05 * (step - BAD_FROM)) * noise.choice((-1.0, 1.0))
    loss = 0.5 * (model(torch.ones(1, 1)) - target).square().mean() + 0.5 + 0.02 * noise.gauss(0.0, 1.0)
    accelerator.backward(loss)
    rate = optimizer.param_groups[0]["lr"]
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss.item(), "lr": rate}, step=step)
    if step % SAVE_EVERY == 0 and step >= BAD_FROM - SAVED_BEFORE:
        accelerator.save_state(f"checkpoints/opt_step-{step}")
    if step >= BAD_FROM:
        time.sleep(WATCHED)  # the detector looks once a second
accelerator.end_training()
