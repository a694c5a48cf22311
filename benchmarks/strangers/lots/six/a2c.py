"""Advantage actor-critic on a small world of our own; the LR and the entropy bonus are annealed, runs by updates."""

import os

import numpy as np
import torch
from torch import nn

import chronicle


class Corridor:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.at, self.left = int(self.rng.integers(3, 7)), 20
        return self.observe()

    def observe(self):
        out = np.zeros(10, dtype=np.float32)
        out[self.at] = 1
        return out

    def step(self, action):
        self.at = int(np.clip(self.at + (1 if action else -1), 0, 9))
        self.left -= 1
        return self.observe(), float(self.at == 9), self.at in (0, 9) or self.left == 0


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 2), nn.Linear(32, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def forward(self, x):
        h = self.body(x)
        return torch.distributions.Categorical(logits=self.actor(h)), self.critic(h).squeeze(-1)


UPDATES, HORIZON, LR = 40, 8, 7e-3
np.random.seed(1)
torch.manual_seed(1)
envs = [Corridor(i) for i in range(4)]
agent = Agent()
optimizer = torch.optim.RMSprop(agent.parameters(), lr=LR, alpha=0.99, eps=1e-5)
chronicle.attach("strangers", agent, optimizer)  # the line
first = 1
if os.path.exists("a2c.pt"):
    saved = torch.load("a2c.pt")
    agent.load_state_dict(saved["agent"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["update"] + 1
seen = np.stack([env.reset() for env in envs])
for update in range(first, UPDATES + 1):
    optimizer.param_groups[0]["lr"] = LR * (1.0 - (update - 1.0) / UPDATES)
    logs, values, rewards, masks, entropies = [], [], [], [], []
    for _ in range(HORIZON):
        policy, value = agent(torch.from_numpy(seen))
        action = policy.sample()
        out = [env.step(int(a)) for env, a in zip(envs, action, strict=True)]
        seen = np.stack([env.reset() if done else obs for env, (obs, _, done) in zip(envs, out, strict=True)])
        logs.append(policy.log_prob(action))
        values.append(value)
        entropies.append(policy.entropy())
        rewards.append(torch.tensor([r for _, r, _ in out]))
        masks.append(torch.tensor([1.0 - d for _, _, d in out]))
    with torch.no_grad():
        returns = agent(torch.from_numpy(seen))[1]
    targets = []
    for reward, mask in zip(reversed(rewards), reversed(masks), strict=True):
        returns = reward + 0.95 * returns * mask
        targets.insert(0, returns)
    advantage = torch.stack(targets) - torch.stack(values)
    loss = -(torch.stack(logs) * advantage.detach()).mean() + 0.5 * advantage.square().mean()
    loss = loss - 0.01 * (1 - update / UPDATES) * torch.stack(entropies).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
    optimizer.step()
    if update % 5 == 0:
        torch.save({"agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "update": update}, "a2c.pt")
