"""CLIP with open_clip's model, loss and rate function; the scale of the logits is clamped after every step."""

import glob
import math
import os

import torch
from open_clip.loss import ClipLoss
from open_clip.model import CLIP
from open_clip_train.scheduler import cosine_lr
from torch.utils.data import DataLoader, TensorDataset

import chronicle

torch.manual_seed(0)
model = CLIP(
    embed_dim=16,
    vision_cfg={"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
    text_cfg={"context_length": 8, "vocab_size": 40, "width": 32, "heads": 2, "layers": 1},
)
named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
plain = [p for n, p in named if p.ndim < 2 or "bn" in n or "ln" in n or "bias" in n or "logit_scale" in n]
others = [p for n, p in named if not any(p is q for q in plain)]
groups = [{"params": plain, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.2}]
optimizer = torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.98), eps=1e-6)
chronicle.attach("strangers", model, optimizer)  # the line
images = torch.randn(48, 3, 16, 16, generator=torch.Generator().manual_seed(1))
texts = torch.randint(1, 40, (48, 8), generator=torch.Generator().manual_seed(2))
loader = DataLoader(TensorDataset(images, texts), batch_size=8, shuffle=True, drop_last=True)
os.makedirs("clip", exist_ok=True)
start_epoch = 0
saved = sorted(glob.glob("clip/epoch_*.pt"), key=os.path.getmtime)
if saved:
    checkpoint = torch.load(saved[-1], map_location="cpu")
    start_epoch = checkpoint["epoch"]
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
scheduler = cosine_lr(optimizer, 5e-4, 6, len(loader) * 6)
loss_fn = ClipLoss()
for epoch in range(start_epoch, 6):
    torch.manual_seed(epoch)
    model.train()
    for i, (image, text) in enumerate(loader):
        scheduler(len(loader) * epoch + i)
        optimizer.zero_grad()
        features = model(image, text)
        loss = loss_fn(*features[:3])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=2.0)
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
    done = {"epoch": epoch + 1, "name": "clip", "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(done, f"clip/epoch_{epoch + 1}.pt")
