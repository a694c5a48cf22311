"""Masked language modelling with the HF Trainer: random masks by the collator, dynamic padding, evaluation, the best model at the end."""

import os
import random

from datasets import Dataset
from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast, DataCollatorForLanguageModeling, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

with open("vocab.txt", "w") as file:
    file.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(60))]))
tokenizer = BertTokenizerFast("vocab.txt")
rng = random.Random(0)
rows = [" ".join(f"w{rng.randrange(60)}" for _ in range(rng.randrange(6, 14))) for _ in range(80)]
data = Dataset.from_dict({"text": rows}).map(lambda row: tokenizer(row["text"], truncation=True, max_length=16), remove_columns=["text"])
config = BertConfig(vocab_size=65, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=32)
arguments = TrainingArguments(
    "out", max_steps=36, per_device_train_batch_size=4, learning_rate=5e-4, warmup_steps=4, save_steps=4, eval_strategy="steps",
    eval_steps=4, load_best_model_at_end=True, save_total_limit=3, logging_steps=4, report_to=[], use_cpu=True, disable_tqdm=True,
)
trainer = Trainer(
    BertForMaskedLM(config), arguments, train_dataset=data.select(range(64)), eval_dataset=data.select(range(64, 80)),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.2), processing_class=tokenizer,
)
trainer.train(resume_from_checkpoint=get_last_checkpoint("out") if os.path.isdir("out") else None)
