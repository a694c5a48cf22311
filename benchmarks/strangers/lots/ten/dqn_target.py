"""Deep Q-learning: a target network copied every ten steps, a replay list in the checkpoint, epsilon that falls."""

import os
import random

import torch
from torch import nn

import chronicle

torch.manual_seed(67)
random.seed(67)
online = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
target = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)).requires_grad_(False)
target.load_state_dict(online.state_dict())
optimizer = torch.optim.Adam(online.parameters(), lr=1e-3, eps=1.5e-4)
chronicle.attach("strangers", [online, target], optimizer)  # the line
memory, frame, place = [], 0, torch.zeros(4)
if os.path.exists("dqn.pt"):
    state = torch.load("dqn.pt", weights_only=False)
    online.load_state_dict(state["online"])
    target.load_state_dict(state["target"])
    optimizer.load_state_dict(state["optimizer"])
    memory, frame, place = state["memory"], state["frame"], state["place"]
while frame < 90:
    greedy = random.random() > max(0.05, 1 - frame / 60)
    with torch.no_grad():
        action = int(online(place).argmax()) if greedy else random.randrange(2)
    after = (place + torch.randn(4) * 0.1 + (action * 2 - 1) * 0.05).clamp(-2, 2)
    memory.append((place, action, float(1 - after.abs().sum()), after))
    place = after if after.abs().max() < 1.5 else torch.zeros(4)
    frame += 1
    if frame >= 16 and frame % 2 == 0:
        batch = random.sample(memory, 8)
        s, s2 = torch.stack([b[0] for b in batch]), torch.stack([b[3] for b in batch])
        a, r = torch.tensor([b[1] for b in batch]), torch.tensor([b[2] for b in batch])
        wanted = r + 0.99 * target(s2).max(1).values
        loss = nn.functional.huber_loss(online(s).gather(1, a[:, None])[:, 0], wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(online.parameters(), 100)
        optimizer.step()
    if frame % 10 == 0:
        target.load_state_dict(online.state_dict())
    if frame % 12 == 0:
        parts = {"online": online.state_dict(), "target": target.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**parts, "memory": memory, "frame": frame, "place": place}, "dqn.pt")
