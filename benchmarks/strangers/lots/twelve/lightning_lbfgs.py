"""Lightning with L-BFGS and a closure, gradient clipping by value, a metric with a state, checkpoints by time and by step, no line."""

import glob
import os

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn


class Curve(pl.LightningModule):
    def __init__(self, width=12):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch, _):
        out = self.net(batch[0])
        loss = nn.functional.mse_loss(out, batch[1])
        self.error(out.detach(), batch[1])
        self.log("error", self.error, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.LBFGS(self.parameters(), lr=0.2, max_iter=4, history_size=6)
        plan = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plan, "interval": "step"}}


pl.seed_everything(23, verbose=False)
x = torch.randn(90, 3, generator=torch.Generator().manual_seed(6))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sin().sum(-1, keepdim=True)), batch_size=15)
saver = pl.callbacks.ModelCheckpoint("curves", every_n_train_steps=3, save_top_k=-1, filename="{step}")
trainer = pl.Trainer(
    max_epochs=6, callbacks=[saver], accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
    gradient_clip_val=1.0, gradient_clip_algorithm="value",
)
last = max(glob.glob("curves/*.ckpt"), key=os.path.getmtime, default=None)
trainer.fit(Curve(), loader, ckpt_path=last)
