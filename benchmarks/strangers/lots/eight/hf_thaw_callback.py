"""HF Trainer on token classes: a callback of the script's own thaws the encoder, evaluation and the best model at the end."""

import numpy as np
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForTokenClassification,
    DataCollatorForTokenClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

set_seed(1)
words = ["red", "blue", "green", "small", "large", "old", "new", "fast", "slow", "warm", "cold", "near", "far"]
tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
texts = [[words[(i * k + 1) % 13] for k in range(1, 5 + i % 5)] for i in range(80)]
rows = Dataset.from_list([
    {"input_ids": tokenizer.convert_tokens_to_ids(text), "attention_mask": [1] * len(text), "labels": [len(w) % 3 for w in text]}
    for text in texts
])  # fmt: skip
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
model = BertForTokenClassification(BertConfig(vocab_size=64, max_position_embeddings=64, num_labels=3, **sizes))
for p in model.bert.embeddings.parameters():
    p.requires_grad = False


class Thaw(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **_):
        for p in model.bert.embeddings.parameters():
            p.requires_grad = state.global_step >= 12


def accuracy(seen):
    return {"accuracy": float((np.argmax(seen.predictions, -1) == seen.label_ids).mean())}


args = TrainingArguments(
    "tags",
    num_train_epochs=4,
    per_device_train_batch_size=8,
    learning_rate=3e-3,
    lr_scheduler_type="cosine_with_restarts",
    warmup_steps=2,
    eval_strategy="steps",
    eval_steps=5,
    save_steps=5,
    load_best_model_at_end=True,
    metric_for_best_model="accuracy",
    logging_steps=5,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=rows,
    eval_dataset=rows.select(range(16)),
    data_collator=DataCollatorForTokenClassification(tokenizer),
    compute_metrics=accuracy,
    callbacks=[Thaw()],
)
trainer.train(resume_from_checkpoint=get_last_checkpoint("tags"))
