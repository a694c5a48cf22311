"""HF Trainer with a schedule-free optimizer, epochs as the unit of saving, a metric, own collation, no line."""

import os

import numpy as np
import torch
from transformers import DistilBertConfig, DistilBertForTokenClassification, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

set_seed(61)
rows = [{"input_ids": [1, *(3 + (i * k) % 40 for k in range(1, 5 + i % 5)), 2], "labels": [-100, *((i * k) % 3 for k in range(1, 5 + i % 5)), -100]} for i in range(96)]


def collate(batch):
    width = max(len(one["input_ids"]) for one in batch)
    fill = lambda name, blank: torch.tensor([one[name] + [blank] * (width - len(one[name])) for one in batch])  # noqa: E731
    ids = fill("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": fill("labels", -100)}


def measure(predictions):
    scores, labels = predictions
    kept = labels != -100
    return {"accuracy": float((np.argmax(scores, -1)[kept] == labels[kept]).mean())}


model = DistilBertForTokenClassification(DistilBertConfig(vocab_size=50, dim=32, n_layers=2, n_heads=2, hidden_dim=48, max_position_embeddings=24, num_labels=3))
arguments = TrainingArguments(
    "tags", num_train_epochs=6, per_device_train_batch_size=8, eval_strategy="epoch", save_strategy="epoch", optim="schedule_free_adamw",
    lr_scheduler_type="constant", warmup_steps=5, learning_rate=2e-3, load_best_model_at_end=True, metric_for_best_model="accuracy",
    save_total_limit=3, report_to="none", use_cpu=True, disable_tqdm=True, label_smoothing_factor=0.05, weight_decay=0.01,
)
trainer = Trainer(model, arguments, data_collator=collate, train_dataset=rows[:64], eval_dataset=rows[64:], compute_metrics=measure)
trainer.train(resume_from_checkpoint=get_last_checkpoint("tags") if os.path.isdir("tags") else None)
