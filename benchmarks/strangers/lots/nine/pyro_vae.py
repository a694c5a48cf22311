"""A variational autoencoder in Pyro, trained with a torch optimizer on a differentiable ELBO."""

import os

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Trace_ELBO
from torch import nn

import chronicle

pyro.set_rng_seed(4)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(16, 24), nn.Softplus(), nn.Linear(24, 6)), nn.Linear(3, 16)

    def model(self, x):
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", x.shape[0]):
            z = pyro.sample("latent", dist.Normal(x.new_zeros(x.shape[0], 3), 1.0).to_event(1))
            pyro.sample("obs", dist.Bernoulli(logits=self.decoder(z)).to_event(1), obs=x)

    def guide(self, x):
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", x.shape[0]):
            loc, log_scale = self.encoder(x).chunk(2, -1)
            pyro.sample("latent", dist.Normal(loc, log_scale.clamp(-3, 3).exp()).to_event(1))


vae = VAE()
optimizer = torch.optim.Adam(vae.parameters(), lr=1e-2)
elbo = Trace_ELBO()
chronicle.attach("strangers", vae, optimizer)  # the line
data = (torch.rand(60, 16) > 0.5).float()
start = 0
if os.path.exists("vae.pt"):
    saved = torch.load("vae.pt")
    vae.load_state_dict(saved["vae"]), optimizer.load_state_dict(saved["opt"])
    start = saved["epoch"]
for epoch in range(start, 12):
    for batch in data[torch.randperm(60)].split(15):
        optimizer.zero_grad()
        loss = elbo.differentiable_loss(vae.model, vae.guide, batch) / len(batch)
        loss.backward()
        optimizer.step()
    torch.save({"vae": vae.state_dict(), "opt": optimizer.state_dict(), "epoch": epoch + 1}, "vae.pt")
