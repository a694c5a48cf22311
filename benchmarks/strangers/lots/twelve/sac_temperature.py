"""Soft actor-critic: three optimizers, a temperature that is a bare tensor, a delayed policy, a replay memory in the checkpoint."""

import copy
import itertools
import os
import random

import torch
from torch import nn

import chronicle

torch.manual_seed(3)
random.seed(3)


def mlp(sizes):
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp([4, 32, 4])

    def sample(self, seen):
        mean, log_std = self.net(seen).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 1).exp())
        raw = normal.rsample()
        action = raw.tanh()
        return action, (normal.log_prob(raw) - (1 - action.square() + 1e-6).log()).sum(-1)


actor, critics = Actor(), nn.ModuleList([mlp([6, 32, 1]), mlp([6, 32, 1])])
targets = copy.deepcopy(critics).requires_grad_(False)
log_alpha = torch.zeros((), requires_grad=True)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
critic_optimizer = torch.optim.Adam(critics.parameters(), lr=3e-3)
alpha_optimizer = torch.optim.Adam([log_alpha], lr=3e-3)
chronicle.attach("strangers", [actor, critics], [actor_optimizer, critic_optimizer, alpha_optimizer])  # the line
memory, step, seen = [], 0, torch.zeros(4)
if os.path.exists("sac.pt"):
    saved = torch.load("sac.pt", weights_only=False)
    actor.load_state_dict(saved["actor"])
    critics.load_state_dict(saved["critics"])
    targets.load_state_dict(saved["targets"])
    with torch.no_grad():
        log_alpha.copy_(saved["log_alpha"])
    for optimizer, state in zip((actor_optimizer, critic_optimizer, alpha_optimizer), saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    memory, step, seen = saved["memory"], saved["step"], saved["seen"]
while step < 60:
    with torch.no_grad():
        action = actor.sample(seen[None])[0][0] if len(memory) > 16 else torch.rand(2) * 2 - 1
    after = (seen * 0.9 + 0.1 * torch.randn(4)).clamp(-2, 2)
    after[:2] += 0.3 * action
    memory.append((seen, action, -after.square().sum(), after))
    seen = after
    if len(memory) < 16:
        continue
    rows = [torch.stack(column) for column in zip(*random.sample(memory, 16), strict=True)]
    alpha = log_alpha.exp().detach()
    with torch.no_grad():
        acted, log = actor.sample(rows[3])
        best = torch.min(*(q(torch.cat([rows[3], acted], -1))[:, 0] for q in targets))
        aim = rows[2] + 0.97 * (best - alpha * log)
    loss = sum((q(torch.cat([rows[0], rows[1]], -1))[:, 0] - aim).square().mean() for q in critics)
    critic_optimizer.zero_grad()
    loss.backward()
    critic_optimizer.step()
    if step % 2 == 0:
        acted, log = actor.sample(rows[0])
        value = torch.min(*(q(torch.cat([rows[0], acted], -1))[:, 0] for q in critics))
        actor_optimizer.zero_grad()
        (alpha * log - value).mean().backward()
        actor_optimizer.step()
        alpha_optimizer.zero_grad()
        (-log_alpha.exp() * (log.detach() - 2)).mean().backward()
        alpha_optimizer.step()
    with torch.no_grad():
        for held, new in zip(targets.parameters(), critics.parameters(), strict=True):
            held.lerp_(new, 0.01)
    step += 1
    if step % 6 == 0:
        state = {"actor": actor.state_dict(), "critics": critics.state_dict(), "targets": targets.state_dict(), "log_alpha": log_alpha.detach()}
        optimizers = [optimizer.state_dict() for optimizer in (actor_optimizer, critic_optimizer, alpha_optimizer)]
        torch.save({**state, "optimizers": optimizers, "memory": memory, "step": step, "seen": seen}, "sac.pt")
