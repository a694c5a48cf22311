"""HF Trainer over a stream: an iterable data set with a shuffle buffer, masks drawn by the collator, whole words in BERT."""

from datasets import Dataset
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

words = ["red", "blue", "green", "small", "large", "old", "new", "fast", "slow", "warm", "cold", "near", "far", "is", "not"]
tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
texts = [" ".join(words[(i * k + 3) % 15] for k in range(1, 10 + i % 7)) for i in range(160)]
stream = Dataset.from_dict({"text": texts}).to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=32)
stream = stream.map(lambda row: tokenizer(row["text"], truncation=True, max_length=24), remove_columns=["text"])
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
model = BertForMaskedLM(BertConfig(vocab_size=64, max_position_embeddings=64, **sizes))
args = TrainingArguments(
    "mlm",
    max_steps=40,
    per_device_train_batch_size=4,
    learning_rate=2e-3,
    lr_scheduler_type="inverse_sqrt",
    warmup_steps=5,
    weight_decay=0.01,
    save_steps=5,
    save_total_limit=3,
    logging_steps=5,
    seed=99,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.2)
trainer = Trainer(model=model, args=args, train_dataset=stream, data_collator=collator, processing_class=tokenizer)
trainer.train(resume_from_checkpoint=get_last_checkpoint("mlm"))
