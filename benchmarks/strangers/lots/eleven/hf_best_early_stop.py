"""HF Trainer: evaluation, the best model at the end, early stopping, two checkpoints kept, grouped lengths."""

import os

import torch
from transformers import BertConfig, BertForSequenceClassification, EarlyStoppingCallback, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

set_seed(107)
rows = [
    {"input_ids": [2, *(5 + (i * k) % 40 for k in range(1, 4 + i % 6)), 3], "label": i % 2, "attention_mask": [1] * (5 + i % 6)} for i in range(120)
]


def collate(batch):
    width = max(len(one["input_ids"]) for one in batch)
    fill = lambda name: torch.tensor([one[name] + [0] * (width - len(one[name])) for one in batch])  # noqa: E731
    return {"input_ids": fill("input_ids"), "attention_mask": fill("attention_mask"), "labels": torch.tensor([one["label"] for one in batch])}


model = BertForSequenceClassification(
    BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, max_position_embeddings=32)
)
arguments = TrainingArguments(
    "best", num_train_epochs=4, per_device_train_batch_size=6, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=4, save_steps=4,
    save_total_limit=2, load_best_model_at_end=True, metric_for_best_model="eval_loss", lr_scheduler_type="cosine_with_restarts", warmup_steps=3,
    learning_rate=1e-3, report_to="none", use_cpu=True, disable_tqdm=True, max_grad_norm=0.5, adam_beta2=0.98,
)
trainer = Trainer(
    model, arguments, data_collator=collate, train_dataset=rows[:96], eval_dataset=rows[96:], callbacks=[EarlyStoppingCallback(20)],
)
trainer.train(resume_from_checkpoint=get_last_checkpoint("best") if os.path.isdir("best") else None)
