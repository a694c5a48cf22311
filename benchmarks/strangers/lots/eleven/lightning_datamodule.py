"""Lightning: a data module with a state of its own, a checkpoint every few steps, two groups and a schedule for each step."""

import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl.seed_everything(103, verbose=False)


class Data(pl.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.epochs_seen = 0

    def train_dataloader(self):
        self.epochs_seen += 1
        x = torch.randn(90, 7, generator=torch.Generator().manual_seed(5))
        return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=9, shuffle=True)

    def state_dict(self):
        return {"seen": self.epochs_seen}

    def load_state_dict(self, state):
        self.epochs_seen = state["seen"]


class Module(pl.LightningModule):
    def __init__(self, width=26):
        super().__init__()
        self.save_hyperparameters()
        self.body, self.head = nn.Sequential(nn.Linear(7, width), nn.LayerNorm(width), nn.ReLU()), nn.Linear(width, 2)

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1], label_smoothing=0.1)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        groups = [{"params": self.body.parameters(), "lr": 1e-3}, {"params": self.head.parameters(), "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=4e-3)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-3, 4e-3], total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


saver = ModelCheckpoint("ckpt", save_last=True, every_n_train_steps=4, save_top_k=2, monitor="loss")
trainer = pl.Trainer(
    max_epochs=6, accelerator="cpu", callbacks=[saver], gradient_clip_val=0.5, enable_progress_bar=False, enable_model_summary=False, logger=False,
)
trainer.fit(Module(), datamodule=Data(), ckpt_path="ckpt/last.ckpt" if os.path.exists("ckpt/last.ckpt") else None, weights_only=False)
