"""neuraloperator's Trainer with its Fourier operator: complex weights, four files a checkpoint in one directory, AdamW of its own."""

import os

os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # its metadata hold a function

import torch
from neuralop import LpLoss, Trainer
from neuralop.models import FNO
from neuralop.training import AdamW

import chronicle

torch.manual_seed(67)
x = torch.randn(48, 1, 8, 8, generator=torch.Generator().manual_seed(1))
rows = [{"x": one, "y": one.roll(1, -1) * 0.5 + one.square() * 0.1} for one in x]
loader = torch.utils.data.DataLoader(rows[:40], batch_size=8, shuffle=True)
held = torch.utils.data.DataLoader(rows[40:], batch_size=8)
model = FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2)
optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
plan = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
chronicle.attach("strangers", model, optimizer, plan, data=loader)  # the line
trainer = Trainer(model=model, n_epochs=8, device="cpu", eval_interval=1)
loss = LpLoss(d=2, p=2)
trainer.train(
    train_loader=loader, test_loaders={"held": held}, optimizer=optimizer, scheduler=plan, training_loss=loss, eval_losses={"l2": loss},
    save_every=1, save_dir="darcy", resume_from_dir="darcy" if os.path.exists("darcy/manifest.pt") else None,
)
