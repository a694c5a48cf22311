"""A GAN that grows: at two steps both networks get a layer, the optimizers a group, and the new layer fades in."""

import os

import torch
from torch import nn

import chronicle

torch.manual_seed(31)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.grown, self.heads, self.alpha = nn.Linear(6, 24), nn.ModuleList(), nn.ModuleList([nn.Linear(24, 8)]), 1.0

    def grow(self):
        self.grown.append(nn.Linear(24, 24))
        self.heads.append(nn.Linear(24, 8))
        return [*self.grown[-1].parameters(), *self.heads[-1].parameters()]

    def forward(self, z):
        h = old = nn.functional.leaky_relu(self.first(z), 0.2)
        for layer in self.grown:
            old, h = h, nn.functional.leaky_relu(layer(h), 0.2)
        out = self.heads[-1](h)
        return out if self.alpha >= 1 else self.alpha * out + (1 - self.alpha) * self.heads[-2](old)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry, self.grown, self.out = nn.Linear(8, 24), nn.ModuleList(), nn.Linear(24, 1)

    def grow(self):
        self.grown.append(nn.Linear(24, 24))
        return list(self.grown[-1].parameters())

    def forward(self, x):
        h = nn.functional.leaky_relu(self.entry(x), 0.2)
        for layer in self.grown:
            h = h + nn.functional.leaky_relu(layer(h), 0.2)
        return self.out(h)


generator, critic = Generator(), Critic()
g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.99))
d_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.99))
chronicle.attach("strangers", [generator, critic], [g_optimizer, d_optimizer])  # the line


def grow():
    g_optimizer.add_param_group({"params": generator.grow(), "lr": 1e-3})
    d_optimizer.add_param_group({"params": critic.grow(), "lr": 1e-3})


step = 0
if os.path.exists("grown.pt"):
    state = torch.load("grown.pt")
    for _ in range(state["stages"]):
        grow()
    generator.load_state_dict(state["generator"])
    critic.load_state_dict(state["critic"])
    g_optimizer.load_state_dict(state["g_optimizer"])
    d_optimizer.load_state_dict(state["d_optimizer"])
    step = state["step"]
while step < 42:
    if step in (10, 20) and len(generator.grown) < step // 10:
        grow()
    generator.alpha = min(1.0, (step % 10 + 1) / 5) if 10 <= step < 30 else 1.0
    real = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).cumsum(-1)
    z = torch.randn(16, 6)
    fake = generator(z)
    x = torch.lerp(real, fake.detach(), torch.rand(16, 1)).requires_grad_()
    slope = torch.autograd.grad(critic(x).sum(), x, create_graph=True)[0].norm(dim=-1)
    loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * (slope - 1).square().mean()
    d_optimizer.zero_grad()
    loss.backward()
    d_optimizer.step()
    g_optimizer.zero_grad()
    (-critic(generator(torch.randn(16, 6))).mean()).backward()
    g_optimizer.step()
    step += 1
    if step % 5 == 0:
        both = {"generator": generator.state_dict(), "critic": critic.state_dict()}
        optimizers = {"g_optimizer": g_optimizer.state_dict(), "d_optimizer": d_optimizer.state_dict()}
        torch.save({**both, **optimizers, "stages": len(generator.grown), "step": step}, "grown.pt")
