"""TRL's DPO with LoRA, reference log probabilities computed beforehand, accumulation and evaluation."""

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import DPOConfig, DPOTrainer

words = ["red", "blue", "green", "small", "large", "old", "new", "fast", "slow", "warm", "cold", "near", "far"]
rows = [
    {
        "prompt": [{"role": "user", "content": " ".join(words[(i + k) % 13] for k in range(3 + i % 4))}],
        "chosen": [{"role": "assistant", "content": " ".join(words[(i * k) % 13] for k in range(2 + i % 5))}],
        "rejected": [{"role": "assistant", "content": " ".join(words[(i + k * k) % 13] for k in range(2 + i % 3))}],
    }
    for i in range(64)
]
config = DPOConfig(
    output_dir="dpo", max_steps=30, max_length=48, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-3,
    precompute_ref_log_probs=True, save_steps=4, logging_steps=4, eval_strategy="steps", eval_steps=8, bf16=False,
    gradient_checkpointing=False, report_to="none", use_cpu=True, disable_tqdm=True, lr_scheduler_type="cosine",
)
trainer = DPOTrainer(
    model=AutoModelForCausalLM.from_pretrained("tiny-llama"), args=config, train_dataset=Dataset.from_list(rows[:48]),
    eval_dataset=Dataset.from_list(rows[48:]), processing_class=AutoTokenizer.from_pretrained("tiny-llama"),
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
trainer.train(resume_from_checkpoint=get_last_checkpoint("dpo"))
