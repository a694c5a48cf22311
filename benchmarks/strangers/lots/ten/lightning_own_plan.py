"""Lightning: a callback of the script grows the accumulation, anneals dropout and thaws a part, all as an epoch begins."""

import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl.seed_everything(29, verbose=False)


class Plan(Callback):
    def on_train_epoch_start(self, trainer, module):
        trainer.accumulate_grad_batches = 1 if trainer.current_epoch < 2 else 2
        module.drop.p = 0.3 / (1 + trainer.current_epoch)
        module.back.requires_grad_(trainer.current_epoch >= 1)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.back, self.drop, self.head = nn.Linear(8, 24), nn.Dropout(0.3), nn.Linear(24, 3)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.head(self.drop(self.back(batch[0]).relu())), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adamax(self.parameters(), lr=2e-3)


x = torch.randn(64, 8, generator=torch.Generator().manual_seed(6))
loader = DataLoader(TensorDataset(x, torch.arange(64) % 3), batch_size=8, shuffle=True)
trainer = pl.Trainer(
    max_epochs=7, accelerator="cpu", callbacks=[Plan(), ModelCheckpoint(".", save_last=True, every_n_epochs=1)],
    enable_progress_bar=False, enable_model_summary=False, logger=False,
)
trainer.fit(Module(), loader, ckpt_path="last.ckpt" if os.path.exists("last.ckpt") else None, weights_only=False)
