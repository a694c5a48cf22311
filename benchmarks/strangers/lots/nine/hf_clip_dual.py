"""A small CLIP with the HF Trainer: images flipped at random by a transform of the dataset, cosine with restarts, group by nothing."""

import os

import torch
from datasets import Dataset
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

text = CLIPTextConfig(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=8, projection_dim=8, eos_token_id=2, bos_token_id=1)
vision = CLIPVisionConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4, projection_dim=8)
torch.manual_seed(16)
model = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8))
data = Dataset.from_dict({"seed": list(range(48))})


def transform(rows):
    pixels, ids = [], []
    for seed in rows["seed"]:
        generator = torch.Generator().manual_seed(seed)
        picture = torch.rand(3, 8, 8, generator=generator)
        pixels.append(picture.flip(-1) if torch.rand(()) < 0.5 else picture)
        ids.append(torch.cat([torch.tensor([1]), torch.randint(3, 40, (5,), generator=generator), torch.tensor([2])]))
    return {"pixel_values": pixels, "input_ids": ids}


def collate(batch):
    ids = torch.stack([row["input_ids"] for row in batch])
    return {"pixel_values": torch.stack([row["pixel_values"] for row in batch]), "input_ids": ids, "attention_mask": torch.ones_like(ids), "return_loss": True}


arguments = TrainingArguments(
    "clip", max_steps=36, per_device_train_batch_size=8, learning_rate=1e-3, lr_scheduler_type="cosine_with_restarts", warmup_steps=3,
    save_steps=5, report_to=[], use_cpu=True, disable_tqdm=True, remove_unused_columns=False, seed=16,
)
trainer = Trainer(model, arguments, train_dataset=data.with_transform(transform), data_collator=collate)
trainer.train(resume_from_checkpoint=get_last_checkpoint("clip") if os.path.isdir("clip") else None)
