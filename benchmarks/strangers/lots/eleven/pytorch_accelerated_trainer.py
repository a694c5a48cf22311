"""pytorch-accelerated's Trainer: it builds its own Accelerator, schedule and checkpoints."""

import os
from functools import partial

import torch
from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from torch import nn
from torch.utils.data import TensorDataset

import chronicle

torch.manual_seed(71)


class Save(TrainerCallback):
    def on_training_run_start(self, trainer, **_):
        if os.path.exists("state.pt"):
            trainer.load_checkpoint("state.pt")

    def on_train_epoch_end(self, trainer, **_):
        trainer.save_checkpoint("state.pt", save_per_node=False)


x = torch.randn(96, 9, generator=torch.Generator().manual_seed(2))
rows = TensorDataset(x, x[:, :1].abs())
model = nn.Sequential(nn.Linear(9, 30), nn.SiLU(), nn.Linear(30, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
guarded = chronicle.attach("strangers", model, optimizer)  # the line
trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=[Save()])
trainer.train(
    rows, num_epochs=8, per_device_batch_size=16, create_scheduler_fn=partial(torch.optim.lr_scheduler.StepLR, step_size=9, gamma=0.7),
)
