"""MMEngine's Runner: its hooks, an averaged copy, a schedule of its own classes; resumed by `resume=True`."""

import os

os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # its checkpoints hold objects of its own
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import Dataset

import chronicle


class Pictures(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index)), index % 4


class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))

    def forward(self, pictures, labels, mode="tensor"):
        out = self.net(pictures)
        return {"loss": nn.functional.cross_entropy(out, labels)} if mode == "loss" else out


class Guard(Hook):
    def before_run(self, runner):
        self.run = chronicle.attach("strangers", runner.model, runner.optim_wrapper.optimizer)  # the line


runner = Runner(
    model=Model(),
    work_dir="work",
    train_dataloader={"dataset": Pictures(), "batch_size": 8, "num_workers": 0, "collate_fn": {"type": "default_collate"}, "sampler": {"type": "DefaultSampler", "shuffle": True}},
    train_cfg={"by_epoch": True, "max_epochs": 5},
    optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4}, "clip_grad": {"max_norm": 5}},
    param_scheduler=[
        {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "begin": 0, "end": 6},
        {"type": "CosineAnnealingLR", "T_max": 5, "by_epoch": True},
    ],
    default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 4, "by_epoch": False}, "logger": None},
    custom_hooks=[Guard(), {"type": "EMAHook"}],
    randomness={"seed": 5},
    resume=True,
    log_level="ERROR",
)
runner.train()
