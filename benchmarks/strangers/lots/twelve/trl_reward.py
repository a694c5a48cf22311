"""TRL's reward trainer with a head of its own, LoRA, checkpointed blocks and evaluation, no line."""

import os

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import RewardConfig, RewardTrainer

tokenizer = AutoTokenizer.from_pretrained("tiny-llama")
model = AutoModelForSequenceClassification.from_pretrained("tiny-llama", num_labels=1)
words = ["red", "blue", "green", "small", "large", "old", "new", "fast"]
ask = lambda i: [{"role": "user", "content": f"is {words[i % 8]} {words[i // 8 % 8]}"}]  # noqa: E731
answer = lambda text: [{"role": "assistant", "content": text}]  # noqa: E731
rows = [{"chosen": ask(i) + answer(f"{words[i % 8]} is near"), "rejected": ask(i) + answer(f"not {words[(i + 3) % 8]}")} for i in range(64)]
arguments = RewardConfig(
    "reward", num_train_epochs=4, per_device_train_batch_size=4, gradient_accumulation_steps=2, save_steps=4, eval_strategy="steps", eval_steps=4,
    learning_rate=2e-3, lr_scheduler_type="cosine", warmup_steps=4, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, max_length=48,
    gradient_checkpointing=False, center_rewards_coefficient=0.01, save_total_limit=3, seed=59,
)
lora = LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], modules_to_save=["score"])
trainer = RewardTrainer(
    model=model, args=arguments, processing_class=tokenizer, train_dataset=Dataset.from_list(rows[:48]), eval_dataset=Dataset.from_list(rows[48:]),
    peft_config=lora,
)
trainer.train(resume_from_checkpoint=get_last_checkpoint("reward") if os.path.isdir("reward") else None)
