"""Value learning with noisy layers, a prioritised memory that is saved with the rest, and a target copied every eight steps."""

import copy
import os
import random

import numpy as np
import torch
from torch import nn

import chronicle

random.seed(2), np.random.seed(2), torch.manual_seed(2)


class Noisy(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.mean, self.spread = nn.Linear(a, b), nn.Parameter(torch.full((b, a), 0.02))
        self.register_buffer("noise", torch.randn(b, a))

    def draw(self):
        self.noise.normal_()

    def forward(self, x):
        return self.mean(x) + nn.functional.linear(x, self.spread * self.noise)


online = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), Noisy(24, 3))
target = copy.deepcopy(online)
optimizer = torch.optim.Adam(online.parameters(), lr=1e-3, eps=1.5e-4)
chronicle.attach("strangers", online, optimizer)  # the line
memory, priorities, frame, learned = [], [], 0, 0
if os.path.exists("rainbow.pt"):
    saved = torch.load("rainbow.pt", weights_only=False)
    online.load_state_dict(saved["online"]), target.load_state_dict(saved["target"])
    optimizer.load_state_dict(saved["optimizer"])
    memory, priorities, frame, learned = saved["memory"], saved["priorities"], saved["frame"], saved["learned"]
state = np.random.randn(6).astype("float32")
while learned < 60:
    online[2].draw()
    with torch.no_grad():
        action = int(online(torch.from_numpy(state)).argmax())
    following = (0.9 * state + 0.1 * np.random.randn(6)).astype("float32")
    memory.append((state, action, float(following[action]), following))
    priorities.append(max(priorities, default=1.0))
    state, frame = following, frame + 1
    if frame < 16 or frame % 2:
        continue
    share = np.array(priorities) ** 0.5
    chosen = np.random.choice(len(memory), 8, p=share / share.sum())
    states, actions, rewards, nexts = (torch.as_tensor(np.array(part)) for part in zip(*(memory[i] for i in chosen), strict=True))
    online[2].draw(), target[2].draw()
    value = online(states).gather(1, actions[:, None])[:, 0]
    with torch.no_grad():
        best = online(nexts).argmax(1, keepdim=True)
        wanted = rewards.float() + 0.9 * target(nexts).gather(1, best)[:, 0]
    errors = (value - wanted).abs()
    optimizer.zero_grad()
    nn.functional.smooth_l1_loss(value, wanted).backward()
    nn.utils.clip_grad_norm_(online.parameters(), 10)
    optimizer.step()
    learned += 1
    for index, error in zip(chosen, errors.tolist(), strict=True):
        priorities[index] = error + 1e-3
    if learned % 8 == 0:
        target.load_state_dict(online.state_dict())
    if learned % 6 == 0:
        parts = {"online": online.state_dict(), "target": target.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**parts, "memory": memory, "priorities": priorities, "frame": frame, "learned": learned}, "rainbow.pt")
