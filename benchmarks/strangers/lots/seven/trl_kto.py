"""TRL's KTOTrainer on unpaired preferences with LoRA; the reference is the base model below the adapter."""

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import KTOConfig, KTOTrainer

words = ["red", "blue", "green", "small", "large", "old", "new", "fast", "slow", "warm", "cold", "near", "far"]
rows = [
    {
        "prompt": [{"role": "user", "content": " ".join(words[(i + k) % 13] for k in range(3 + i % 4))}],
        "completion": [{"role": "assistant", "content": " ".join(words[(i * k) % 13] for k in range(2 + i % 5))}],
        "label": i % 3 != 0,
    }
    for i in range(64)
]
tokenizer = AutoTokenizer.from_pretrained("tiny-llama")
model = AutoModelForCausalLM.from_pretrained("tiny-llama")
config = KTOConfig(
    output_dir="kto",
    max_steps=30,
    max_length=48,
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    beta=0.1,
    warmup_steps=3,
    save_steps=5,
    logging_steps=5,
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = KTOTrainer(
    model=model,
    args=config,
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
trainer.train(resume_from_checkpoint=get_last_checkpoint("kto"))
