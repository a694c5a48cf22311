"""MONAI's SupervisedTrainer with its handlers: CheckpointSaver with the trainer's state, CheckpointLoader, rate by epochs."""

import glob
import os

import torch
from monai.data import CacheDataset, DataLoader
from monai.engines import SupervisedTrainer
from monai.handlers import CheckpointLoader, CheckpointSaver, LrScheduleHandler
from monai.inferers import SimpleInferer
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.transforms import Compose, RandFlipd, RandGaussianNoised
from monai.utils import set_determinism

import chronicle

set_determinism(seed=3)
rng = torch.Generator().manual_seed(0)
items = [{"image": torch.rand(1, 16, 16, generator=rng), "label": (torch.rand(1, 16, 16, generator=rng) > 0.5).float()} for _ in range(24)]
augment = Compose([RandFlipd(keys=["image", "label"], prob=0.5), RandGaussianNoised(keys="image", prob=0.3)])
loader = DataLoader(CacheDataset(items, augment, progress=False), batch_size=4, shuffle=True, num_workers=0)
net = UNet(spatial_dims=2, in_channels=1, out_channels=1, channels=(4, 8), strides=(2,), dropout=0.1)
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
chronicle.attach("strangers", net, optimizer, schedule)  # the line
parts = {"net": net, "opt": optimizer, "lr": schedule}
handlers = [
    LrScheduleHandler(lr_scheduler=schedule, print_lr=False),
    CheckpointSaver(save_dir="monai", save_dict=parts, save_interval=1, n_saved=2),
]
saved = sorted(glob.glob("monai/checkpoint_epoch=*.pt"), key=os.path.getmtime)
if saved:
    handlers.append(CheckpointLoader(load_path=saved[-1], load_dict=parts, map_location="cpu"))
trainer = SupervisedTrainer(
    device=torch.device("cpu"),
    max_epochs=6,
    train_data_loader=loader,
    network=net,
    optimizer=optimizer,
    loss_function=DiceLoss(sigmoid=True),
    inferer=SimpleInferer(),
    train_handlers=handlers,
)
if saved:
    trainer.state.epoch = int(saved[-1].split("=")[1].split(".")[0])
trainer.run()
