"""A GPT-2 in one file: tokens from shards by a loader of its own, tied weights, decay groups, LR by a function, position in the checkpoint."""

import math
import os

import numpy as np
import torch
from torch import nn

import chronicle

torch.manual_seed(1337)
if not os.path.exists("shard_0.npy"):
    for i in range(3):
        np.save(f"shard_{i}.npy", np.random.default_rng(i).integers(0, 48, 400).astype(np.uint16))


class Tokens:
    def __init__(self, b, t):
        self.b, self.t, self.shard, self.at = b, t, 0, 0

    def next(self):
        tokens = torch.from_numpy(np.load(f"shard_{self.shard}.npy").astype(np.int64))
        rows = tokens[self.at : self.at + self.b * self.t + 1]
        self.at += self.b * self.t
        if self.at + self.b * self.t + 1 > len(tokens):
            self.shard, self.at = (self.shard + 1) % 3, 0
        return rows[:-1].view(self.b, self.t), rows[1:].view(self.b, self.t)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln1, self.ln2, self.qkv, self.proj = nn.LayerNorm(d), nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(approximate="tanh"), nn.Linear(4 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (part.view(b, t, 2, d // 2).transpose(1, 2) for part in self.qkv(self.ln1(x)).chunk(3, -1))
        x = x + self.proj(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.wte, self.wpe, self.blocks, self.ln = nn.Embedding(48, d), nn.Embedding(16, d), nn.ModuleList(Block(d) for _ in range(2)), nn.LayerNorm(d)
        self.head = nn.Linear(d, 48, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, x, y):
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return nn.functional.cross_entropy(self.head(self.ln(h)).flatten(0, 1), y.flatten())


model, data = GPT(), Tokens(4, 16)
groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
chronicle.attach("strangers", model, optimizer)  # the line


def lr_at(step):
    if step < 5:
        return 1e-3 * (step + 1) / 5
    return 1e-4 + 0.5 * (1 + math.cos(math.pi * (step - 5) / 35)) * 9e-4


begin = 0
if os.path.exists("gpt.pt"):
    state = torch.load("gpt.pt", weights_only=False)
    model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
    begin, (data.shard, data.at) = state["step"] + 1, state["data"]
    torch.set_rng_state(state["rng"])
for step in range(begin, 40):
    for group in optimizer.param_groups:
        group["lr"] = lr_at(step)
    optimizer.zero_grad(set_to_none=True)
    for _ in range(2):
        (model(*data.next()) / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step and step % 4 == 0:
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        torch.save({**parts, "step": step, "data": (data.shard, data.at)}, "gpt.pt")
