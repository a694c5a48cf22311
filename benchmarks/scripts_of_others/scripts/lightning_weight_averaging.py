"""Lightning with StochasticWeightAveraging, accumulation that grows by a scheduler, a warm-up per step."""

import glob
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, Dataset

from chronicle.resume.lightning import ChronicleCallback


class Waves(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        t = torch.linspace(0, 6.28, 24)
        return torch.sin(t * (1 + i % 5)).unsqueeze(0), torch.tensor(i % 5)


class ConvNet(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 8, 5), nn.ReLU(), nn.Conv1d(8, 8, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(1))
        self.head = nn.Linear(8, 5)

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.body(x).flatten(1)), y)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
        return [optimizer], [{"scheduler": warmup, "interval": "step"}]


pl.seed_everything(0, verbose=False)
swa = StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=5)
callbacks = [swa, GradientAccumulationScheduler({0: 1, 4: 2}), ModelCheckpoint("swa", every_n_epochs=1, save_top_k=-1)]
callbacks.append(ChronicleCallback("strangers"))  # the line
trainer = pl.Trainer(max_epochs=9, accelerator="cpu", logger=False, callbacks=callbacks, enable_progress_bar=False)
saved = sorted(glob.glob("swa/*.ckpt"), key=os.path.getmtime)
trainer.fit(ConvNet(), DataLoader(Waves(), batch_size=8, shuffle=True), ckpt_path=saved[-1] if saved else None)
