"""Lightning: a data module, validation, ReduceLROnPlateau on the validation loss, ModelCheckpoint with last and top k."""

import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from chronicle.resume.lightning import ChronicleCallback


class Data(pl.LightningDataModule):
    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(120, 12, generator=generator)
        y = (x[:, :3].sum(1) > 0).long()
        self.train, self.val = random_split(TensorDataset(x, y), [96, 24], generator=generator)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=24)


class Classifier(pl.LightningModule):
    def __init__(self, lr=0.05, hidden=16):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(12, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, 2))

    def step(self, batch, name):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log(f"{name}_loss", loss, prog_bar=False)
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def configure_optimizers(self):
        optimizer = torch.optim.RMSprop(self.parameters(), lr=self.hparams.lr, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


pl.seed_everything(5)
callbacks = [
    ModelCheckpoint("ckpt", monitor="val_loss", save_top_k=2, save_last=True),
    LearningRateMonitor("step"),
    EarlyStopping("val_loss", patience=50),
    ChronicleCallback("strangers"),  # the line
]
trainer = pl.Trainer(max_epochs=8, accelerator="cpu", logger=CSVLogger("csv"), callbacks=callbacks, log_every_n_steps=1,
                     enable_progress_bar=False, gradient_clip_val=0.5)  # fmt: skip
trainer.fit(Classifier(), Data(), ckpt_path="ckpt/last.ckpt" if os.path.exists("ckpt/last.ckpt") else None)
