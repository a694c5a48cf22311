"""DeepSpeed ZeRO-1 with an optimizer and a LambdaLR of the client, a sampler seeded by the epoch, bf16 off."""

import os
import socket

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
import deepspeed
import torch
from torch import nn

import chronicle

torch.manual_seed(1)
deepspeed.init_distributed("gloo")
model = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6) * 0.98**step)
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 5000},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.5,
    "steps_per_print": 1000,
}
engine, optimizer, _, scheduler = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
engine = chronicle.guard(engine, run_dir="strangers")  # the line
x = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
y = torch.arange(64) % 3
dataset = torch.utils.data.TensorDataset(x, y)
sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=1, rank=0, seed=9)
loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler)
_, client = engine.load_checkpoint("zero1") if os.path.isdir("zero1") else (None, None)
first = client["epoch"] + 1 if client else 0
for epoch in range(first, 6):
    sampler.set_epoch(epoch)
    engine.train()
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(engine(inputs), labels)
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint("zero1", tag=f"epoch{epoch}", client_state={"epoch": epoch, "loss": float(loss)})
