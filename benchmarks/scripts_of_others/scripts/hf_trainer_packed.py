"""HF Trainer on packed token blocks, eval every few steps, early stopping, an optimizer and schedule handed over."""

import datasets
import torch
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
    get_cosine_with_min_lr_schedule_with_warmup,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

set_seed(7)
generator = torch.Generator().manual_seed(0)
lengths = torch.randint(5, 40, (120,), generator=generator).tolist()
raw = datasets.Dataset.from_dict({"input_ids": [torch.randint(3, 64, (n,), generator=generator).tolist() for n in lengths]})


def group_texts(examples):
    joined = sum(([*ids, 2] for ids in examples["input_ids"]), [])
    total = len(joined) // 24 * 24
    blocks = [joined[i : i + 24] for i in range(0, total, 24)]
    return {"input_ids": blocks, "labels": [list(block) for block in blocks]}


packed = raw.map(group_texts, batched=True, batch_size=40)
split = packed.train_test_split(test_size=0.1, seed=0)
config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=1, max_position_embeddings=64, attention_dropout=0.1)  # fmt: skip
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
scheduler = get_cosine_with_min_lr_schedule_with_warmup(optimizer, 4, 40, min_lr_rate=0.1)
args = TrainingArguments(
    output_dir="packed",
    max_steps=40,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    eval_strategy="steps",
    eval_steps=5,
    save_steps=5,
    save_total_limit=2,
    load_best_model_at_end=True,
    metric_for_best_model="eval_loss",
    logging_steps=1,
    gradient_checkpointing=True,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=split["train"],
    eval_dataset=split["test"],
    data_collator=default_data_collator,
    optimizers=(optimizer, scheduler),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=20)],
)
trainer.train(resume_from_checkpoint=get_last_checkpoint("packed"))
