"""DeepSpeed ZeRO-2 that makes the loader and the schedule itself (`training_data`, WarmupDecayLR), saves by steps."""

import os
import socket

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
import deepspeed
import torch
from transformers import BertConfig, BertForMaskedLM

import chronicle

deepspeed.init_distributed("gloo")
torch.manual_seed(21)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
model = BertForMaskedLM(BertConfig(vocab_size=60, max_position_embeddings=32, **sizes))


class Masked(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(4, 60, (16,), generator=generator)
        hidden = torch.rand(16, generator=generator) < 0.15
        hidden[0] = True
        return {"input_ids": ids.masked_fill(hidden, 3), "labels": ids.masked_fill(~hidden, -100)}


config = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2, "overlap_comm": False},
    "zero_force_ds_cpu_optimizer": False,
    "optimizer": {"type": "Adam", "params": {"lr": 5e-3, "torch_adam": True, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": 30, "warmup_max_lr": 5e-3}},
    "gradient_clipping": 1.0,
    "steps_per_print": 1000,
}
engine, _, loader, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), training_data=Masked(), config=config
)
chronicle.guard(engine, run_dir="strangers")  # the line
step = 0
if os.path.exists("mlm/latest"):
    _, client_state = engine.load_checkpoint("mlm")
    step = client_state["step"]
while step < 30:
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if boundary:
            step += 1
            if step % 5 == 0:
                engine.save_checkpoint("mlm", client_state={"step": step})
            if step >= 30:
                break
