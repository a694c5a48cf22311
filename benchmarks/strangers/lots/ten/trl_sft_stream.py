"""TRL's SFT over a stream of conversations, loss on the answers only."""

import os

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

words = ["red", "blue", "green", "small", "large", "old", "new", "fast", "slow", "warm", "cold", "near", "far"]
rows = [
    {
        "prompt": [{"role": "user", "content": " ".join(words[(i + k) % 13] for k in range(3 + i % 4))}],
        "completion": [{"role": "assistant", "content": " ".join(words[(i * k) % 13] for k in range(2 + i % 5))}],
    }
    for i in range(160)
]
config = SFTConfig(
    output_dir="sft", max_steps=32, max_length=48, per_device_train_batch_size=4, learning_rate=1e-3, warmup_steps=3, save_steps=4,
    logging_steps=4, bf16=False, gradient_checkpointing=False, report_to="none", use_cpu=True, disable_tqdm=True,
)
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained("tiny-llama"), args=config, train_dataset=Dataset.from_list(rows).to_iterable_dataset(4),
    processing_class=AutoTokenizer.from_pretrained("tiny-llama"),
)
trainer.train(resume_from_checkpoint=get_last_checkpoint("sft") if os.path.isdir("sft") else None)
