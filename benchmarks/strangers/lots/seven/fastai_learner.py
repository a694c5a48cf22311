"""fastai: a Learner whose optimizer is torch's in OptimWrapper, fit_one_cycle with start_epoch, SaveModelCallback every epoch."""

import glob
import os
from functools import partial

import torch
from fastai.callback.schedule import *  # noqa: F403
from fastai.callback.tracker import SaveModelCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chronicle

torch.manual_seed(3)
x = torch.randn(56, 1, 12, 12, generator=torch.Generator().manual_seed(5))
ds = TensorDataset(x, torch.arange(56) % 3)
dls = DataLoaders(DataLoader(ds, batch_size=8, shuffle=True), DataLoader(ds, batch_size=16))
net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
opt_func = partial(OptimWrapper, opt=torch.optim.AdamW)
learn = Learner(dls, net, loss_func=nn.CrossEntropyLoss(), opt_func=opt_func, path=".", model_dir="models")
learn.create_opt()
chronicle.attach("strangers", learn.model, learn.opt.opt)  # the line
done = sorted(glob.glob("models/model_*.pth"), key=os.path.getmtime)
start_epoch = 0
if done:
    name = os.path.basename(done[-1])[:-4]
    learn.load(name, with_opt=True)
    start_epoch = int(name.split("_")[1]) + 1
with learn.no_bar(), learn.no_logging():
    save = SaveModelCallback(every_epoch=True, with_opt=True)
    learn.fit_one_cycle(6, lr_max=3e-3, cbs=[save], start_epoch=start_epoch)
