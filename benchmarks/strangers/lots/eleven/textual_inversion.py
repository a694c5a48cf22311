"""Diffusers' textual inversion: one new row of the embeddings is learnt, all others are put back after every step."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import CLIPTextConfig, CLIPTextModel

import chronicle

set_seed(109)
accelerator = chronicle.guard(Accelerator(cpu=True, gradient_accumulation_steps=2))  # the line
text = CLIPTextModel(CLIPTextConfig(vocab_size=60, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16))
text.resize_token_embeddings(61)
text.requires_grad_(False)
text.get_input_embeddings().weight.requires_grad_(True)
unet = nn.Linear(24, 24).requires_grad_(False)
optimizer = torch.optim.AdamW(text.get_input_embeddings().parameters(), lr=5e-3)
schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, 1)
ids = torch.randint(0, 59, (48, 8), generator=torch.Generator().manual_seed(2))
ids[:, 3] = 60
loader = DataLoader(TensorDataset(ids), batch_size=4, shuffle=True)
text, optimizer, loader, schedule = accelerator.prepare(text, optimizer, loader, schedule)
before = accelerator.unwrap_model(text).get_input_embeddings().weight.data.clone()
step, first = 0, 0
if os.path.isdir("inversion") and (old := sorted(os.listdir("inversion"), key=lambda name: int(name.split("-")[1]))):
    accelerator.load_state(os.path.join("inversion", old[-1]))
    step = int(old[-1].split("-")[1])
    first = step // 6
for epoch in range(first, 7):
    text.train()
    for (batch,) in loader:
        with accelerator.accumulate(text):
            hidden = text(batch)[0]
            noise = torch.randn_like(hidden)
            loss = nn.functional.mse_loss(unet(hidden + noise), noise)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            keep = torch.ones(61, dtype=torch.bool)
            keep[60] = False
            with torch.no_grad():
                accelerator.unwrap_model(text).get_input_embeddings().weight[keep] = before[keep]
        if accelerator.sync_gradients:
            step += 1
            if step % 3 == 0:
                accelerator.save_state(f"inversion/checkpoint-{step}")
