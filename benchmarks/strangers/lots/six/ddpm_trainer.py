"""A diffusion trainer class over Accelerate: milestones by torch.save, an EMA that starts late, samples at every milestone."""

import copy
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

import chronicle


def cycle(loader):
    while True:
        yield from loader


class EMA(nn.Module):
    def __init__(self, model, beta=0.95, update_after=4, every=2):
        super().__init__()
        self.online_model, self.ema_model = [model], copy.deepcopy(model)
        self.beta, self.update_after, self.every = beta, update_after, every
        self.register_buffer("initted", torch.tensor(False))
        self.register_buffer("step", torch.tensor(0))

    def update(self):
        step = int(self.step)
        self.step += 1
        if step % self.every or step <= self.update_after:
            return
        if not self.initted:
            self.ema_model.load_state_dict(self.online_model[0].state_dict())
            self.initted.fill_(True)
        for a, b in zip(self.ema_model.parameters(), self.online_model[0].parameters(), strict=True):
            a.data.lerp_(b.data, 1 - self.beta)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(20, 16)
        self.inner, self.mid, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, t):
        return self.out(torch.relu(self.mid(torch.relu(self.inner(x) + self.time(t)))))


class Diffusion(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(1e-3, 0.2, 20), 0))

    def forward(self, x):
        t = torch.randint(0, 20, (len(x),))
        noise = torch.randn_like(x)
        a = self.alphas[t][:, None]
        return nn.functional.mse_loss(self.model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)

    @torch.inference_mode()
    def sample(self, n):
        x = torch.randn(n, 16)
        for t in reversed(range(20)):
            x = x - 0.1 * self.model(x, torch.full((n,), t))
        return x


class Trainer:
    def __init__(self, diffusion, dataset, steps=36, milestone_every=6, accumulate=2):
        self.accelerator = chronicle.guard(Accelerator(cpu=True), run_dir="strangers")  # the line
        self.steps, self.every, self.accumulate, self.step = steps, milestone_every, accumulate, 0
        loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)
        self.dl = cycle(self.accelerator.prepare(loader))
        self.opt = torch.optim.Adam(diffusion.parameters(), lr=1e-3, betas=(0.9, 0.99))
        self.ema = EMA(diffusion)
        self.model, self.opt = self.accelerator.prepare(diffusion, self.opt)

    def save(self, milestone):
        data = {
            "step": self.step,
            "model": self.accelerator.get_state_dict(self.model),
            "opt": self.opt.state_dict(),
            "ema": self.ema.state_dict(),
            "scaler": None,
        }
        torch.save(data, f"results/model-{milestone}.pt")

    def load(self, milestone):
        data = torch.load(f"results/model-{milestone}.pt", weights_only=True)
        self.accelerator.unwrap_model(self.model).load_state_dict(data["model"])
        self.step = data["step"]
        self.opt.load_state_dict(data["opt"])
        self.ema.load_state_dict(data["ema"])

    def train(self):
        while self.step < self.steps:
            self.model.train()
            for _ in range(self.accumulate):
                with self.accelerator.autocast():
                    loss = self.model(next(self.dl)) / self.accumulate
                self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            self.opt.zero_grad()
            self.step += 1
            self.ema.update()
            if self.step % self.every == 0:
                self.ema.ema_model.eval()
                self.ema.ema_model.sample(2)
                self.save(self.step // self.every)


torch.manual_seed(10)
Path("results").mkdir(exist_ok=True)
trainer = Trainer(Diffusion(Denoiser()), torch.randn(64, 16))
numbers = sorted(int(p.stem.split("-")[1]) for p in Path("results").glob("model-*.pt"))
if numbers:
    trainer.load(numbers[-1])
trainer.train()
