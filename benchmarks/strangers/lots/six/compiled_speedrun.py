"""A compiled GPT with several groups of one optimizer and a trapezoid set by hand at every step (speedrun style)."""

import os
import time

import torch
from torch import nn

import chronicle

torch.manual_seed(1337)


class Rotary(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim)), persistent=False)

    def forward(self, n):
        angle = torch.outer(torch.arange(n).float(), self.inv_freq)
        return angle.cos(), angle.sin()


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.rotary = Rotary(width // heads)
        self.proj.weight.data.zero_()

    def forward(self, x):
        b, n, w = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, w // self.heads).unbind(2)
        cos, sin = self.rotary(n)
        cos, sin = cos[None, :, None], sin[None, :, None]

        def turn(t):
            a, c = t.chunk(2, -1)
            return torch.cat([a * cos + c * sin, c * cos - a * sin], -1)

        y = nn.functional.scaled_dot_product_attention(
            turn(q).transpose(1, 2), turn(k).transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.proj(y.transpose(1, 2).reshape(b, n, w))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(48, 16)
        self.blocks = nn.ModuleList([Attention(16, 2) for _ in range(2)])
        self.skips = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(16, 48, bias=False)

    def forward(self, ids, targets):
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            x = x + self.skips[i] * block(nn.functional.rms_norm(x, (16,)))
        logits = 30 * torch.tanh(self.head(x) / 30)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


raw = GPT()
model = torch.compile(raw, backend="aot_eager")
groups = [
    {"params": [raw.embed.weight], "lr": 0.02},
    {"params": [raw.head.weight], "lr": 0.004},
    {"params": list(raw.blocks.parameters()), "lr": 0.008},
    {"params": [raw.skips], "lr": 0.01},
]
optimizer = torch.optim.Adam(groups, betas=(0.8, 0.95), eps=1e-10, fused=False)
for group in optimizer.param_groups:
    group["initial_lr"] = group["lr"]
chronicle.attach("strangers", raw, optimizer)  # the line
total, cooldown, start = 40, 16, 0
if os.path.exists("state.pt"):
    state = torch.load("state.pt")
    raw.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"] + 1
tokens = torch.randint(48, (2000,), generator=torch.Generator().manual_seed(2))
clock = time.perf_counter()
for step in range(start, total):
    scale = 1.0 if step < total - cooldown else (total - step) / cooldown
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * scale
    at = step * 48
    loss = model(tokens[at : at + 48].view(3, 16), tokens[at + 1 : at + 49].view(3, 16))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % 5 == 4:
        torch.save({"step": step, "model": raw.state_dict(), "optimizer": optimizer.state_dict()}, "state.pt")
