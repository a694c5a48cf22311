"""The Trainer1D of denoising-diffusion-pytorch on random curves: its own save and load by milestones."""

import glob

import torch
from denoising_diffusion_pytorch import Dataset1D, GaussianDiffusion1D, Trainer1D, Unet1D

import chronicle

torch.manual_seed(2)
net = Unet1D(dim=8, dim_mults=(1, 2), channels=4)
diffusion = GaussianDiffusion1D(net, seq_length=16, timesteps=20, objective="pred_v")
rows = Dataset1D(torch.rand(48, 4, 16, generator=torch.Generator().manual_seed(1)))
trainer = Trainer1D(
    diffusion,
    dataset=rows,
    train_batch_size=8,
    train_lr=8e-5,
    train_num_steps=30,
    gradient_accumulate_every=2,
    ema_decay=0.995,
    save_and_sample_every=4,
    num_samples=4,
    results_folder="results",
)
chronicle.attach("strangers", trainer.model, trainer.opt)  # the line
milestones = sorted(int(name.rsplit("-", 1)[1][:-3]) for name in glob.glob("results/model-*.pt"))
if milestones:
    trainer.load(milestones[-1])
trainer.train()
