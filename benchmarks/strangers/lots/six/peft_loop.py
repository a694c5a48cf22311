"""LoRA by PEFT in a loop of our own: the adapter is saved by save_pretrained, optimizer and scheduler beside it."""

import json
import os

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

import chronicle

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
base = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, num_key_value_heads=2, **sizes))
resume = json.load(open("adapter/state.json")) if os.path.exists("adapter/state.json") else None
if resume:
    model = PeftModel.from_pretrained(base, "adapter", is_trainable=True)
else:
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "up_proj"]))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
scheduler = get_linear_schedule_with_warmup(optimizer, 3, 40)
chronicle.attach("strangers", model, optimizer, scheduler)  # the line
step = 0
if resume:
    optimizer.load_state_dict(torch.load("adapter/optimizer.pt"))
    scheduler.load_state_dict(torch.load("adapter/scheduler.pt"))
    step = resume["step"]
rows = torch.randint(64, (40, 20), generator=torch.Generator().manual_seed(4))
model.train()
while step < 40:
    ids = rows[(step * 4) % 40 : (step * 4) % 40 + 4]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.3)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    step += 1
    if step % 5 == 0:
        model.save_pretrained("adapter")
        torch.save(optimizer.state_dict(), "adapter/optimizer.pt")
        torch.save(scheduler.state_dict(), "adapter/scheduler.pt")
        json.dump({"step": step}, open("adapter/state.json", "w"))
