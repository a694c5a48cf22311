"""Lightning: an LR finder before the first launch's training only, exceptions saved, LBFGS-free manual schedule by epochs."""

import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl.seed_everything(23, verbose=False)


class Module(pl.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, nesterov=True)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.3)]


x = torch.randn(96, 8, generator=torch.Generator().manual_seed(6))
loader = DataLoader(TensorDataset(x, torch.arange(96) % 3), batch_size=8, shuffle=True)
resume = os.path.exists("last.ckpt")
callbacks = [ModelCheckpoint(".", save_last=True, every_n_epochs=1)]
callbacks += [] if resume else [LearningRateFinder(num_training_steps=8, min_lr=1e-4, max_lr=1e-1)]
trainer = pl.Trainer(
    max_epochs=6, accelerator="cpu", callbacks=callbacks, enable_progress_bar=False, enable_model_summary=False, logger=False
)
trainer.fit(Module(), loader, ckpt_path="last.ckpt" if resume else None, weights_only=False)
