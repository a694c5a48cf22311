"""sentence-transformers: CrossEncoderTrainer with two data sets in turn, binary cross-entropy and a ranking loss."""

from datasets import Dataset
from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss, MultipleNegativesRankingLoss
from transformers.trainer_utils import get_last_checkpoint

words = ["red", "blue", "green", "small", "large", "old", "new", "fast", "slow", "warm"]
one = [f"{words[i % 10]} {words[(i * 3) % 10]}" for i in range(64)]
two = [f"{words[(i * 7) % 10]} {words[(i + 1) % 10]} far" for i in range(64)]
pairs = Dataset.from_dict({"query": one, "answer": two, "label": [float(i % 2) for i in range(64)]})
ranked = Dataset.from_dict({"anchor": two, "positive": one})
model = CrossEncoder("bert-base-cased", num_labels=1, model_kwargs={"ignore_mismatched_sizes": True})
args = CrossEncoderTrainingArguments(
    output_dir="reranker",
    num_train_epochs=3,
    per_device_train_batch_size=8,
    learning_rate=2e-4,
    warmup_steps=4,
    lr_scheduler_type="linear",
    save_strategy="steps",
    save_steps=5,
    save_total_limit=2,
    logging_steps=3,
    multi_dataset_batch_sampler="round_robin",
    seed=12,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = CrossEncoderTrainer(
    model=model,
    args=args,
    train_dataset={"pairs": pairs, "ranked": ranked},
    loss={"pairs": BinaryCrossEntropyLoss(model), "ranked": MultipleNegativesRankingLoss(model, num_negatives=2)},
)
trainer.train(resume_from_checkpoint=get_last_checkpoint("reranker"))
