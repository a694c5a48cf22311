"""Random network distillation: running means of observations as buffers that move while acting, a frozen target, returns normalised."""

import os

import torch
from torch import nn

import chronicle

torch.manual_seed(24)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.value = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 3)), nn.Linear(4, 1)
        self.target, self.predictor = nn.Linear(4, 8).requires_grad_(False), nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.register_buffer("obs_mean", torch.zeros(4))
        self.register_buffer("obs_var", torch.ones(4))
        self.register_buffer("count", torch.tensor(1e-4))

    def watch(self, rows):
        n, total = len(rows), self.count + len(rows)
        delta = rows.mean(0) - self.obs_mean
        self.obs_mean += delta * n / total
        self.obs_var.copy_((self.obs_var * self.count + rows.var(0) * n + delta**2 * self.count * n / total) / total)
        self.count.copy_(total)

    def forward(self, obs):
        scaled = ((obs - self.obs_mean) / self.obs_var.sqrt()).clamp(-5, 5)
        return self.body(scaled), self.value(scaled), (self.predictor(scaled) - self.target(scaled)).square().mean(-1)


agent = Agent()
optimizer = torch.optim.Adam([p for p in agent.parameters() if p.requires_grad], lr=2e-3, eps=1e-5)
chronicle.attach("strangers", agent, optimizer)  # the line
update, state = 0, torch.zeros(4)
if os.path.exists("rnd.pt"):
    saved = torch.load("rnd.pt")
    agent.load_state_dict(saved["agent"]), optimizer.load_state_dict(saved["optimizer"])
    update, state = saved["update"], saved["state"]
while update < 14:
    optimizer.param_groups[0]["lr"] = 2e-3 * (1 - update / 14)
    seen, acts, rewards = [], [], []
    for _ in range(24):
        with torch.no_grad():
            logits, _, bonus = agent(state[None])
        action = int(torch.distributions.Categorical(logits=logits).sample())
        seen.append(state), acts.append(action), rewards.append(float(bonus) - float(state.abs().mean()))
        state = 0.95 * state + 0.1 * torch.randn(4) + 0.05 * (action - 1)
    obs, acts, rewards = torch.stack(seen), torch.tensor(acts), torch.tensor(rewards)
    agent.watch(obs)
    for rows in torch.randperm(24).split(8):
        logits, value, error = agent(obs[rows])
        chosen = torch.distributions.Categorical(logits=logits).log_prob(acts[rows])
        gain = rewards[rows] - value[:, 0]
        loss = -(chosen * gain.detach()).mean() + 0.5 * gain.square().mean() + error.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
    update += 1
    torch.save({"agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "update": update, "state": state}, "rnd.pt")
