"""Lightning: two loaders of unequal length in a CombinedLoader, a DataModule with a state, a warm-up by hand in a hook."""

import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl.seed_everything(19, verbose=False)


class Data(pl.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.used = 0
        x = torch.randn(96, 8, generator=torch.Generator().manual_seed(2))
        self.a, self.b = TensorDataset(x[:64], x[:64].sum(1)), TensorDataset(x[64:])

    def train_dataloader(self):
        loaders = {"a": DataLoader(self.a, batch_size=8, shuffle=True), "b": DataLoader(self.b, batch_size=8, shuffle=True)}
        return CombinedLoader(loaders, "max_size_cycle")

    def state_dict(self):
        return {"used": self.used}

    def load_state_dict(self, state):
        self.used = state["used"]


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 1))

    def training_step(self, batch, index):
        self.trainer.datamodule.used += 1
        x, y = batch["a"]
        return nn.functional.mse_loss(self.net(x)[:, 0], y) + 0.1 * self.net(batch["b"][0]).square().mean()

    def optimizer_step(self, epoch, index, optimizer, closure=None):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (self.trainer.global_step + 1) / 12)
        optimizer.step(closure=closure)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


keep = ModelCheckpoint(".", save_last=True, every_n_train_steps=5)
trainer = pl.Trainer(
    max_epochs=6, accelerator="cpu", callbacks=[keep], enable_progress_bar=False, enable_model_summary=False, logger=False,
    gradient_clip_val=1.0,
)
trainer.fit(Module(), Data(), ckpt_path="last.ckpt" if os.path.exists("last.ckpt") else None, weights_only=False)
