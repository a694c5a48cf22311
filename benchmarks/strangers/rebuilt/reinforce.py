"""Policy gradient: the policy makes its own data, one optimizer step an episode of random length."""

import os
import random

import torch
from torch import nn

import chronicle

torch.manual_seed(543)
random.seed(543)
policy = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.6), nn.ReLU(), nn.Linear(16, 2), nn.Softmax(dim=-1))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
chronicle.attach("strangers", policy, optimizer)  # the line
first = 0
if os.path.exists("policy.pth"):
    saved = torch.load("policy.pth", weights_only=False)
    policy.load_state_dict(saved["policy"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["episode"]


def play():
    """A pole that falls sooner when it is pushed the wrong way."""
    state, chances, rewards = torch.randn(4) * 0.05, [], []
    for _ in range(30):
        choice = torch.distributions.Categorical(policy(state))
        action = choice.sample()
        chances.append(choice.log_prob(action))
        state = state + 0.1 * (action.item() * 2 - 1) + 0.05 * torch.randn(4)
        rewards.append(1.0)
        if state.abs().max() > 0.4:
            break
    return chances, rewards


for episode in range(first, 40):
    policy.train()
    chances, rewards = play()
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + 0.99 * total
        returns.insert(0, total)
    weights = torch.tensor(returns)
    weights = (weights - weights.mean()) / (weights.std(unbiased=False) + 1e-6)
    optimizer.zero_grad()
    torch.stack([-chance * weight for chance, weight in zip(chances, weights, strict=True)]).sum().backward()
    optimizer.step()
    if episode % 4 == 3:
        state = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict(), "episode": episode + 1}
        torch.save(state, "policy.pth")
