"""LoRA under the HF Trainer: a checkpoint holds the adapter only, the base model is made again."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from chronicle.resume.transformers import ChronicleCallback

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
base = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, num_key_value_heads=2, **sizes))
lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.05, target_modules=["q_proj", "v_proj"])
model = get_peft_model(base, lora)
generator = torch.Generator().manual_seed(0)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (64, 12), generator=generator)]
arguments = TrainingArguments(
    "out",
    max_steps=30,
    save_steps=4,
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    lr_scheduler_type="cosine",
    warmup_steps=3,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[ChronicleCallback("strangers")])  # the line
trainer.train(resume_from_checkpoint=get_last_checkpoint("out"))
