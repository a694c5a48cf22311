"""ZeRO-2 on one process; optimizer and WarmupLR come from the configuration."""

import os
import socket

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
import deepspeed
import torch

import chronicle

configuration = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2},
    "zero_force_ds_cpu_optimizer": False,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 8}},
    "gradient_clipping": 1.0,
    "steps_per_print": 1000,
}
torch.manual_seed(0)
deepspeed.init_distributed("gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=configuration)
chronicle.guard(engine, run_dir="strangers")  # the line
if os.path.exists("ck/latest"):
    engine.load_checkpoint("ck")
while engine.global_steps < 30:
    for micro in range(engine.global_steps * 2, engine.global_steps * 2 + 2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(micro))
        loss = (engine(x) - x.sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
    if engine.global_steps % 4 == 0:
        engine.save_checkpoint("ck", client_state={"step": engine.global_steps})
