"""torchtnt's AutoUnit, its loop and its saver of distributed checkpoints."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchtnt.framework.auto_unit import AutoUnit
from torchtnt.framework.callbacks.dcp_saver import DistributedCheckpointSaver
from torchtnt.framework.train import train

import chronicle

torch.manual_seed(61)


class Unit(AutoUnit):
    def configure_optimizers_and_lr_scheduler(self, module):
        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        self.guarded = chronicle.attach("strangers", module, optimizer, schedule)  # the line
        return optimizer, schedule

    def compute_loss(self, state, data):
        outputs = self.module(data[0])
        return nn.functional.cross_entropy(outputs, data[1]), outputs


x = torch.randn(80, 10, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8, shuffle=True)
unit = Unit(module=nn.Sequential(nn.Linear(10, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 2)), step_lr_interval="step")
saver = DistributedCheckpointSaver("tnt", save_every_n_train_steps=3)
if os.path.isdir("tnt"):
    DistributedCheckpointSaver.restore_from_latest("tnt", unit, train_dataloader=loader)
train(unit, loader, max_epochs=5, callbacks=[saver])
