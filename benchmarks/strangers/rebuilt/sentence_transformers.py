"""A sentence encoder: several texts in a row, a loss that needs the whole batch, samplers without duplicates."""

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from sentence_transformers.training_args import BatchSamplers
from transformers import set_seed
from transformers.trainer_utils import get_last_checkpoint

from chronicle.resume.transformers import ChronicleCallback

set_seed(0)
encoder = Transformer("bert-base-cased", max_seq_length=16)
model = SentenceTransformer(modules=[encoder, Pooling(encoder.get_word_embedding_dimension())], device="cpu")
words = ["red", "blue", "green", "small", "large", "old", "new", "fast", "slow", "warm", "cold", "near"]
pairs = [{"anchor": f"{a} {b}", "positive": f"{b} {a} {a}"} for a in words for b in words if a != b]
arguments = SentenceTransformerTrainingArguments(
    "out",
    max_steps=30,
    save_steps=4,
    per_device_train_batch_size=8,
    warmup_steps=3,
    batch_sampler=BatchSamplers.NO_DUPLICATES,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = SentenceTransformerTrainer(
    model,
    arguments,
    train_dataset=Dataset.from_list(pairs),
    loss=MultipleNegativesRankingLoss(model),
    callbacks=[ChronicleCallback("strangers")],  # the line
)
trainer.train(resume_from_checkpoint=get_last_checkpoint("out"))
