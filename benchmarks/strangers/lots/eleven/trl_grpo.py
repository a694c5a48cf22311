"""TRL's GRPO with a reward function of its own, unedited: `chronicle run` guards the HF Trainer beneath it."""

import os

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

words = ["red", "blue", "green", "small", "large", "old", "new", "fast", "slow"]
rows = [{"prompt": " ".join(words[(i + k) % 9] for k in range(3 + i % 3))} for i in range(64)]


def short(completions, **_):
    return [-abs(len(one.split()) - 3.0) for one in completions]


config = GRPOConfig(
    output_dir="grpo", max_steps=20, per_device_train_batch_size=4, num_generations=2, max_completion_length=6, learning_rate=1e-3,
    save_steps=3, logging_steps=3, bf16=False, gradient_checkpointing=False, report_to="none", use_cpu=True, disable_tqdm=True,
)
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained("tiny-llama"), reward_funcs=short, args=config, train_dataset=Dataset.from_list(rows),
    processing_class=AutoTokenizer.from_pretrained("tiny-llama"),
)
trainer.train(resume_from_checkpoint=get_last_checkpoint("grpo") if os.path.isdir("grpo") else None)
