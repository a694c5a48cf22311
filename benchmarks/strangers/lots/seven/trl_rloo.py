"""TRL's RLOOTrainer: completions drawn from the policy, a reward function of two lines."""

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import RLOOConfig, RLOOTrainer

words = ["red", "blue", "green", "small", "large", "old", "new", "fast"]
prompts = [{"prompt": [{"role": "user", "content": f"{words[i % 8]} {words[(i * 5 + 1) % 8]}"}]} for i in range(32)]


def short_is_good(completions, **_):
    return [-float(len(one[0]["content"].split())) for one in completions]


tokenizer = AutoTokenizer.from_pretrained("tiny-llama", padding_side="left")
model = AutoModelForCausalLM.from_pretrained("tiny-llama")
config = RLOOConfig(
    output_dir="rloo",
    max_steps=16,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=6,
    learning_rate=5e-4,
    beta=0.05,
    save_steps=3,
    logging_steps=4,
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = RLOOTrainer(
    model=model, args=config, train_dataset=Dataset.from_list(prompts), processing_class=tokenizer, reward_funcs=short_is_good
)
trainer.train(resume_from_checkpoint=get_last_checkpoint("rloo"))
