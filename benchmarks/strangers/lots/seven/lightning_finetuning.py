"""Lightning's BackboneFinetuning with a data module: the backbone is thawed at epoch 2 with a rate that grows by epochs."""

import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Data(pl.LightningDataModule):
    def setup(self, stage):
        x = torch.randn(64, 10, generator=torch.Generator().manual_seed(4))
        self.rows = TensorDataset(x, (x[:, 0] > 0).long())

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.rows, batch_size=32)


class Tuned(pl.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(nn.Linear(10, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU())
        self.head = nn.Linear(16, 2)

    def training_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 5], gamma=0.5)]


if __name__ == "__main__":
    pl.seed_everything(21, verbose=False)
    unfreeze = BackboneFinetuning(unfreeze_backbone_at_epoch=2, lambda_func=lambda epoch: 1.5, backbone_initial_ratio_lr=0.1)
    keep = ModelCheckpoint("tuned", monitor="val_loss", save_top_k=2, save_last=True)
    trainer = pl.Trainer(max_epochs=7, accelerator="cpu", logger=False, callbacks=[unfreeze, keep], enable_progress_bar=False)
    trainer.fit(Tuned(), Data(), ckpt_path="tuned/last.ckpt" if os.path.exists("tuned/last.ckpt") else None)
