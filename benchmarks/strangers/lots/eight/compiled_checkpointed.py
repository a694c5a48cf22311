"""A compiled model with checkpointed blocks, tied embeddings, two decays, a schedule put together of three."""

import os

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import chronicle

torch.manual_seed(8)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.mix, self.mlp = nn.RMSNorm(dim), nn.Conv1d(dim, dim, 3), nn.Linear(dim, dim)

    def forward(self, x):
        h = nn.functional.pad(self.norm(x).transpose(1, 2), (2, 0))
        return x + self.mlp(nn.functional.gelu(self.mix(h).transpose(1, 2)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(40, 16), nn.ModuleList(Block(16) for _ in range(2))
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


net = Net()
decay, plain = [p for p in net.parameters() if p.ndim > 1], [p for p in net.parameters() if p.ndim < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=2e-3)
kinds = torch.optim.lr_scheduler
parts = [kinds.LinearLR(optimizer, 0.1, total_iters=5), kinds.ConstantLR(optimizer, 1.0, total_iters=15)]
schedule = kinds.SequentialLR(optimizer, [*parts, kinds.CosineAnnealingLR(optimizer, 20)], milestones=[5, 20])
chronicle.attach("strangers", net, optimizer, schedule)  # the line
model = torch.compile(net, backend="aot_eager")
step = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt", weights_only=False)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    step = saved["step"]
data = torch.randint(40, (6000,), generator=torch.Generator().manual_seed(9))
while step < 30:
    rows = data[step * 100 : step * 100 + 100].view(4, 25)
    loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    schedule.step()
    step += 1
    if step % 4 == 0:
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save({**state, "step": step}, "last.pt")
