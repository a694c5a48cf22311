"""The trainer of Coqui TTS: two optimizers of a small GAN, its own files, continued by its `continue_path`."""

import glob
import os
from dataclasses import dataclass, field

import torch
from torch import nn
from trainer import Trainer, TrainerArgs, TrainerConfig, TrainerModel

import chronicle


@dataclass
class Config(TrainerConfig):
    optimizer: str = "RAdam"
    lr: float = 2e-3
    epochs: int = 6
    print_step: int = 50
    save_step: int = 5
    plot_step: int = 500
    save_n_checkpoints: int = 3
    run_eval: bool = False
    dashboard_logger: str = "tensorboard"
    grad_clip: list = field(default_factory=lambda: [5.0, 5.0])


class Vocoder(TrainerModel):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = nn.Sequential(nn.Linear(4, 24), nn.GELU(), nn.Linear(24, 8)), nn.Sequential(nn.Linear(8, 24), nn.LeakyReLU(), nn.Linear(24, 1))

    def forward(self, x):
        return self.generator(x)

    def train_step(self, batch, criterion, optimizer_idx=0):
        x, real = batch["x"], batch["y"]
        fake = self.generator(x)
        if optimizer_idx == 0:
            loss = (1 - self.critic(real)).relu().mean() + (1 + self.critic(fake.detach())).relu().mean()
        else:
            loss = -self.critic(fake).mean() + 10 * criterion(fake, real)
        return {"out": fake}, {"loss": loss}

    def eval_step(self, batch, criterion, optimizer_idx=0):
        return self.train_step(batch, criterion, optimizer_idx)

    def get_criterion(self):
        return [nn.MSELoss(), nn.L1Loss()]

    def get_optimizer(self):
        return [torch.optim.AdamW(self.critic.parameters(), lr=2e-3, betas=(0.8, 0.99)), torch.optim.AdamW(self.generator.parameters(), lr=2e-3)]

    def get_lr(self):
        return [2e-3, 2e-3]

    def get_scheduler(self, optimizer):
        return [torch.optim.lr_scheduler.ExponentialLR(one, 0.95) for one in optimizer]

    def get_data_loader(self, config, is_eval, samples, *, verbose=False, num_gpus=0, rank=0, assets=None):
        draw = torch.Generator().manual_seed(3)
        rows = [{"x": torch.randn(4, generator=draw), "y": torch.randn(8, generator=draw)} for _ in range(64)]
        return torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)


def guard(trainer):
    chronicle.attach("strangers", trainer.model, trainer.optimizer, trainer.scheduler)  # the line


torch.manual_seed(73)
found = sorted(glob.glob("voice/run*/checkpoint_*.pth"), key=os.path.getmtime)
arguments = TrainerArgs(continue_path=os.path.dirname(found[-1])) if found else TrainerArgs()
trainer = Trainer(
    arguments, Config(output_path="voice"), "voice", model=Vocoder(), parse_command_line_args=False, callbacks={"on_init_start": guard},
)
trainer.fit()
