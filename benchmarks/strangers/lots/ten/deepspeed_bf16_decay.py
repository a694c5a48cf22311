"""DeepSpeed with bf16 and float32 masters, WarmupDecayLR, a client state, tags by step."""

import os

os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
os.environ |= {"DS_SKIP_CUDA_CHECK": "1"}
import socket

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    os.environ["MASTER_PORT"] = str(free.getsockname()[1])
import deepspeed
import torch
from torch import nn

import chronicle

deepspeed.init_distributed("gloo")
torch.manual_seed(37)
model = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 4))
configuration = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1}, "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10_000,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 4, "total_num_steps": 60, "warmup_max_lr": 2e-3}},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=configuration)
chronicle.guard(engine)  # the line
x = torch.randn(160, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
step = 0
if os.path.isdir("ds"):
    _, client = engine.load_checkpoint("ds")
    step = client["step"]
while step < 60:
    rows = torch.arange(step * 4, step * 4 + 4) % 160
    loss = nn.functional.cross_entropy(engine(x[rows]).float(), rows % 4)
    engine.backward(loss)
    engine.step()
    step += 1
    if step % 6 == 0:
        engine.save_checkpoint("ds", tag=f"step{step}", client_state={"step": step})
