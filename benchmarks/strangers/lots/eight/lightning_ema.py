"""Lightning's EMAWeightAveraging with gradient clipping by value, a OneCycle per step and checkpoints inside epochs."""

import glob
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regressor(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def training_step(self, batch, _):
        return nn.functional.huber_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.Adamax(self.parameters(), lr=5e-3)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=80)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


if __name__ == "__main__":
    pl.seed_everything(5, verbose=False)
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(3))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    keep = ModelCheckpoint("ema", every_n_train_steps=4, save_top_k=-1, filename="{step}")
    callbacks = [EMAWeightAveraging(decay=0.98), keep]
    trainer = pl.Trainer(
        max_epochs=7, accelerator="cpu", logger=False, callbacks=callbacks, gradient_clip_val=0.5,
        gradient_clip_algorithm="value", enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    saved = sorted(glob.glob("ema/*.ckpt"), key=os.path.getmtime)
    trainer.fit(Regressor(), loader, ckpt_path=saved[-1] if saved else None)
