"""A tiny run under Accelerate whose schedule raises the LR elevenfold at step 300: too much for it, it diverges for real.

With the argument `forget` a resumed launch does not load its checkpoint, as a script with a misspelt path does not.
"""

import random
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator

import chronicle

STEPS, SAVE_EVERY, JUMP_AT, LR, JUMP = 600, 50, 300, 0.4, 11.0  # with momentum 0.9 an LR above 3.8 is unstable

accelerator = chronicle.guard(Accelerator(cpu=True, log_with="chronicle"))
model = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: JUMP if step >= JUMP_AT else 1.0)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.register_for_checkpointing(scheduler)
accelerator.init_trackers("tiny")
saved = {int(path.name.rpartition("-")[2]): path for path in Path("checkpoints").glob("opt_step-*")}
first = max(saved, default=0)
if saved and "forget" not in sys.argv:
    accelerator.load_state(str(saved[first]))
for step in range(first + 1, STEPS + 1):
    noise = random.Random(step)
    error = model(torch.ones(1, 1)) - 0.01 * noise.gauss(0.0, 1.0)
    loss = 0.5 * error.square().mean() + 0.5 + 0.02 * noise.gauss(0.0, 1.0)
    accelerator.backward(loss)
    rate = optimizer.param_groups[0]["lr"]
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss.item(), "lr": rate}, step=step)
    if step % SAVE_EVERY == 0:
        accelerator.save_state(f"checkpoints/opt_step-{step}")
    time.sleep(0.02)
accelerator.end_training()
