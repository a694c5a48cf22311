"""HF Trainer whose loader is the script's own (batches of equal length), two losses, a teacher that is part of no checkpoint."""

import os
import random

import torch
from torch.utils.data import DataLoader, Sampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

rng = random.Random(0)
rows = [torch.tensor([rng.randrange(70) for _ in range(rng.choice((8, 12, 16)))]) for _ in range(96)]


class Buckets(Sampler):
    def __iter__(self):
        batches = []
        for length in (8, 12, 16):
            places = [i for i, row in enumerate(rows) if len(row) == length]
            places = [places[i] for i in torch.randperm(len(places)).tolist()]
            batches += [places[i : i + 4] for i in range(0, len(places) - 3, 4)]
        return iter([batches[i] for i in torch.randperm(len(batches)).tolist()])

    def __len__(self):
        return sum(sum(len(row) == n for row in rows) // 4 for n in (8, 12, 16))


torch.manual_seed(1)
teacher = GPT2LMHeadModel(GPT2Config(vocab_size=70, n_positions=16, n_embd=24, n_layer=1, n_head=2)).eval()


class Distils(Trainer):
    def get_train_dataloader(self):
        collate = lambda batch: {"input_ids": torch.stack(batch), "labels": torch.stack(batch)}  # noqa: E731
        return DataLoader(rows, batch_sampler=Buckets(), collate_fn=collate)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**inputs)
        with torch.no_grad():
            soft = teacher(inputs["input_ids"]).logits.softmax(-1)
        loss = out.loss + 0.5 * torch.nn.functional.kl_div(out.logits.log_softmax(-1), soft, reduction="batchmean")
        return (loss, out) if return_outputs else loss


student = GPT2LMHeadModel(GPT2Config(vocab_size=70, n_positions=16, n_embd=16, n_layer=2, n_head=2))
arguments = TrainingArguments(
    "out", max_steps=36, save_steps=4, logging_steps=4, learning_rate=1e-3, report_to=[], use_cpu=True, disable_tqdm=True,
    remove_unused_columns=False, lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 3},
)
Distils(student, arguments, train_dataset=rows).train(
    resume_from_checkpoint=get_last_checkpoint("out") if os.path.isdir("out") else None
)
