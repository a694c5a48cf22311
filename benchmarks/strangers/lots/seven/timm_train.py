"""timm's own parts: optimizer with layer decay, its cosine scheduler stepped by updates, mixup, ModelEmaV3, CheckpointSaver."""

import os

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.models import resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import CheckpointSaver, ModelEmaV3, random_seed
from torch.utils.data import DataLoader, TensorDataset

import chronicle

random_seed(42, 0)
model = timm.create_model(
    "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=2, num_classes=4, drop_path_rate=0.1
)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
images = torch.randn(48, 3, 32, 32, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(images, torch.arange(48) % 4), batch_size=8, shuffle=True, drop_last=True)
mixup_fn = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=4)
updates, epochs = len(loader), 6
scheduler = CosineLRScheduler(
    optimizer, t_initial=epochs * updates, warmup_t=updates, warmup_lr_init=1e-6, warmup_prefix=True, t_in_epochs=False
)
chronicle.attach("strangers", model, optimizer, scheduler)  # the line
os.makedirs("output", exist_ok=True)
start_epoch = 0
if os.path.exists("output/last.pth.tar"):
    start_epoch = resume_checkpoint(model, "output/last.pth.tar", optimizer=optimizer, log_info=False) or 0
model_ema = ModelEmaV3(model, decay=0.99)
if os.path.exists("output/last.pth.tar"):
    saved = torch.load("output/last.pth.tar", map_location="cpu", weights_only=False)
    model_ema.module.load_state_dict(saved["state_dict_ema"])
scheduler.step_update(start_epoch * updates)
saver = CheckpointSaver(model=model, optimizer=optimizer, model_ema=model_ema, checkpoint_dir="output", recovery_dir="output")
loss_fn = SoftTargetCrossEntropy()
for epoch in range(start_epoch, epochs):
    model.train()
    num_updates = epoch * updates
    total = 0.0
    for x, y in loader:
        x, y = mixup_fn(x, y)
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        num_updates += 1
        model_ema.update(model, step=num_updates)
        scheduler.step_update(num_updates=num_updates, metric=float(loss))
        total += float(loss)
    scheduler.step(epoch + 1, total)
    saver.save_checkpoint(epoch, metric=total / updates)
