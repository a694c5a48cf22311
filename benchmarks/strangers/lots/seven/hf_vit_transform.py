"""HF Trainer on pictures: a ViT, augmentation by `set_transform`, layer-wise rates by an optimizer of the script's own."""

import numpy as np
import torch
from datasets import Dataset
from torchvision.transforms import v2
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed
from transformers.trainer_utils import get_last_checkpoint

set_seed(8)
rng = np.random.default_rng(1)
rows = Dataset.from_dict({"pixels": rng.random((64, 3, 20, 20)).astype("float32").tolist(), "label": [i % 4 for i in range(64)]})
augment = v2.Compose([v2.RandomCrop(16), v2.RandomHorizontalFlip(), v2.Normalize([0.5] * 3, [0.5] * 3)])


def transform(batch):
    pictures = [augment(torch.tensor(one)) for one in batch["pixels"]]
    return {"pixel_values": pictures, "labels": batch["label"]}


rows.set_transform(transform)
config = ViTConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8, num_labels=4
)
model = ViTForImageClassification(config)
head = [p for n, p in model.named_parameters() if n.startswith("classifier")]
body = [p for n, p in model.named_parameters() if not n.startswith("classifier")]
optimizer = torch.optim.NAdam([{"params": head, "lr": 2e-3}, {"params": body, "lr": 5e-4}], decoupled_weight_decay=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [2e-3, 5e-4], total_steps=40)
args = TrainingArguments(
    "vit",
    max_steps=36,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    remove_unused_columns=False,
    label_smoothing_factor=0.1,
    save_steps=5,
    logging_steps=4,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=args, train_dataset=rows, optimizers=(optimizer, scheduler))
trainer.train(resume_from_checkpoint=get_last_checkpoint("vit"))
