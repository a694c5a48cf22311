"""HF Trainer: warm-up, stable, decay; noise on embeddings, label smoothing, an own parameter grouping by the Trainer's arguments."""

import os

import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

ids = torch.randint(90, (96, 16), generator=torch.Generator().manual_seed(1))
data = Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})
config = GPT2Config(vocab_size=90, n_positions=16, n_embd=16, n_layer=2, n_head=2)
arguments = TrainingArguments(
    "out", max_steps=34, per_device_train_batch_size=4, learning_rate=1e-3, lr_scheduler_type="warmup_stable_decay",
    lr_scheduler_kwargs={"num_decay_steps": 8}, warmup_steps=4, neftune_noise_alpha=5.0, label_smoothing_factor=0.1, save_steps=4,
    logging_steps=2, optim="adamw_torch", adam_beta2=0.95, report_to=[], use_cpu=True, disable_tqdm=True, dataloader_num_workers=0,
)
Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data).train(
    resume_from_checkpoint=get_last_checkpoint("out") if os.path.isdir("out") else None
)
