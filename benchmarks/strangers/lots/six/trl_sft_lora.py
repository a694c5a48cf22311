"""TRL's SFTTrainer with LoRA, packing and completion-only loss on chats."""

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("json", data_files="chats/train.jsonl", split="train")
tokenizer = AutoTokenizer.from_pretrained("tiny-llama")
model = AutoModelForCausalLM.from_pretrained("tiny-llama")
peft_config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")
config = SFTConfig(
    output_dir="sft",
    max_steps=36,
    max_length=48,
    packing=True,
    packing_strategy="wrapped",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=2e-3,
    lr_scheduler_type="cosine",
    warmup_steps=4,
    save_steps=4,
    logging_steps=2,
    seed=11,
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = SFTTrainer(model=model, args=config, train_dataset=dataset, processing_class=tokenizer, peft_config=peft_config)
trainer.train(resume_from_checkpoint=get_last_checkpoint("sft"))
trainer.save_model("sft/final")
