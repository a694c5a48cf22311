"""HF Trainer: ReduceLROnPlateau on an evaluation, early stopping, a classifier with frozen embeddings, Adagrad."""

import os

import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, EarlyStoppingCallback, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

ids = torch.randint(5, 60, (112, 12), generator=torch.Generator().manual_seed(5))
data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist(), "label": (ids.sum(1) % 3).tolist()})
config = BertConfig(vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3)
model = BertForSequenceClassification(config)
model.bert.embeddings.requires_grad_(False)
arguments = TrainingArguments(
    "out", num_train_epochs=4, per_device_train_batch_size=8, learning_rate=5e-3, lr_scheduler_type="reduce_lr_on_plateau",
    lr_scheduler_kwargs={"patience": 1, "factor": 0.5}, eval_strategy="steps", eval_steps=4, save_steps=4, save_total_limit=2,
    load_best_model_at_end=True, metric_for_best_model="eval_loss", optim="adagrad", logging_steps=4, report_to=[], use_cpu=True,
    disable_tqdm=True,
)
Trainer(
    model, arguments, train_dataset=data.select(range(96)), eval_dataset=data.select(range(96, 112)),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=20)],
).train(resume_from_checkpoint=get_last_checkpoint("out") if os.path.isdir("out") else None)
