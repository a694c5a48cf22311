"""LitGPT's LoRA model under Fabric: only adapters are trained and saved, a cosine as a function, no line."""

import os

import torch
from lightning.fabric import Fabric
from litgpt.config import Config
from litgpt.lora import GPT, lora_filter, mark_only_lora_as_trainable

fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
fabric.seed_everything(71)
config = {"block_size": 32, "vocab_size": 64, "padded_vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16, "intermediate_size": 32}
lora = {"lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.05, "lora_query": True, "lora_value": True, "lora_projection": True}


def make():
    from litgpt.lora import Config as LoRAConfig

    return GPT(LoRAConfig(**config, **lora))


model = make()
if os.path.exists("base.pt"):
    model.load_state_dict(torch.load("base.pt"), strict=False)
else:
    torch.save({k: v for k, v in model.state_dict().items() if "lora" not in k}, "base.pt")
mark_only_lora_as_trainable(model)
model = fabric.setup(model)
optimizer = fabric.setup_optimizers(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3))
scheduler = torch.optim.lr_scheduler.SequentialLR(
    optimizer.optimizer,
    [torch.optim.lr_scheduler.LinearLR(optimizer.optimizer, 0.1, 1.0, 5), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, 40)],
    [5],
)
ids = torch.randint(64, (120, 17), generator=torch.Generator().manual_seed(0))
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
if os.path.exists("lit.pt"):
    fabric.load("lit.pt", state, strict=False)
assert isinstance(config, dict) and Config
while state["step"] < 36:
    rows = ids[torch.arange(state["step"] * 4, state["step"] * 4 + 4) % 120]
    loss = torch.nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    state["step"] += 1
    if state["step"] % 4 == 0:
        fabric.save("lit.pt", state, filter={"model": lora_filter})
