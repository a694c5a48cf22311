"""Lightning with a plan for the accumulation, torchmetrics as attributes, a step-wise OneCycle and a sanity check of the validation."""

import os

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chronicle.resume.lightning import ChronicleCallback

pl.seed_everything(17, verbose=False)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
        self.accuracy, self.seen = torchmetrics.Accuracy("multiclass", num_classes=4), torchmetrics.MeanMetric()

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.seen.update(loss)
        return loss

    def validation_step(self, batch, index):
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("acc", self.accuracy)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=80)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


x = torch.randn(96, 10)
rows = TensorDataset(x, torch.arange(96) % 4)
loader, val = DataLoader(rows, batch_size=8, shuffle=True), DataLoader(rows, batch_size=32)
keep = ModelCheckpoint(".", save_last=True, every_n_epochs=1)
trainer = pl.Trainer(max_epochs=6, accelerator="cpu", callbacks=[ChronicleCallback("strangers"), keep, GradientAccumulationScheduler({0: 1, 2: 2}), LearningRateMonitor()], enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module(), loader, val, ckpt_path="last.ckpt" if os.path.exists("last.ckpt") else None, weights_only=False)
