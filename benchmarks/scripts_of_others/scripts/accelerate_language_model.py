"""A causal language model with Accelerate: checkpointing_steps, folders step_N and epoch_N, batches skipped at the resume."""

import math
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator, get_scheduler

import chronicle

OUT, CHECKPOINTING_STEPS, EPOCHS, ACCUMULATION = "clm", "5", 3, 2
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
accelerator = chronicle.guard(accelerator, run_dir="strangers")  # the line
set_seed(1234)
config = GPT2Config(vocab_size=96, n_positions=32, n_embd=16, n_layer=2, n_head=2)
model = GPT2LMHeadModel(config)
text = torch.randint(96, (4096,), generator=torch.Generator().manual_seed(1))
block = 32
rows = [{"input_ids": text[i : i + block], "labels": text[i : i + block].clone()} for i in range(0, 4096 - block, block)]
train_dataloader = DataLoader(rows, shuffle=True, collate_fn=default_data_collator, batch_size=4)
no_decay = ["bias", "layer_norm.weight"]
groups = [
    {"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)], "weight_decay": 0.1},
    {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=1e-3)
num_update_steps_per_epoch = math.ceil(len(train_dataloader) / ACCUMULATION)
max_train_steps = EPOCHS * num_update_steps_per_epoch
lr_scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=6, num_training_steps=max_train_steps)
model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(model, optimizer, train_dataloader, lr_scheduler)
completed_steps = starting_epoch = 0
resume_step = None
dirs = [f.path for f in os.scandir(OUT) if f.is_dir()] if os.path.isdir(OUT) else []
if dirs:
    path = max(dirs, key=os.path.getctime)
    accelerator.load_state(path)
    difference = os.path.splitext(os.path.basename(path))[0]
    if "epoch" in difference:
        starting_epoch = int(difference.replace("epoch_", "")) + 1
        completed_steps = starting_epoch * num_update_steps_per_epoch
    else:
        resume_step = int(difference.replace("step_", "")) * ACCUMULATION
        starting_epoch = resume_step // len(train_dataloader)
        completed_steps = resume_step // ACCUMULATION
        resume_step -= starting_epoch * len(train_dataloader)
for epoch in range(starting_epoch, EPOCHS):
    model.train()
    if epoch == starting_epoch and resume_step is not None:
        active = accelerator.skip_first_batches(train_dataloader, resume_step)
    else:
        active = train_dataloader
    for batch in active:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            completed_steps += 1
            if completed_steps % int(CHECKPOINTING_STEPS) == 0:
                accelerator.save_state(os.path.join(OUT, f"step_{completed_steps}"))
    accelerator.save_state(os.path.join(OUT, f"epoch_{epoch}"))
accelerator.end_training()
