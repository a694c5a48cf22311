"""Accelerate with a DeepSpeed plugin (ZeRO-2, one process), client optimizer, warm-up by transformers' scheduler."""

import os
import socket

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "ACCELERATE_USE_CPU": "true"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_DEEPSPEED": "true"}
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_cosine_schedule_with_warmup

import chronicle

config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 10**6,
}
accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
accelerator = chronicle.guard(accelerator, run_dir="strangers")  # the line
set_seed(5)
model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = get_cosine_schedule_with_warmup(optimizer, 4, 40)
x = torch.randn(80, 12, generator=torch.Generator().manual_seed(6))
loader = DataLoader(TensorDataset(x, torch.arange(80) % 4), batch_size=8, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
overall = 0
saved = sorted((n for n in os.listdir("zero") if n.startswith("step_")), key=lambda n: int(n[5:])) if os.path.isdir("zero") else []
if saved:
    accelerator.load_state(os.path.join("zero", saved[-1]))
    overall = int(saved[-1][5:])
first, skip = divmod(overall, len(loader))
for epoch in range(first, 4):
    model.train()
    active = accelerator.skip_first_batches(loader, skip) if epoch == first and skip else loader
    for inputs, labels in active:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        overall += 1
        if overall % 4 == 0:
            accelerator.save_state(os.path.join("zero", f"step_{overall}"))
accelerator.end_training()
