"""A curriculum: batch size and length of the sequences grow by stages, the rate with the root of the batch."""

import os

import torch
from torch import nn

import chronicle

STAGES = [(0, 4, 8), (10, 8, 12), (20, 16, 16)]  # first step, batch, length
torch.manual_seed(123)
text = torch.randint(32, (6000,))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru, self.head = nn.Embedding(32, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 32)

    def forward(self, ids):
        return self.head(self.gru(self.embed(ids))[0])


def stage(step):
    return [s for s in STAGES if s[0] <= step][-1][1:]


net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: (stage(s)[0] / 4) ** 0.5 * min(1, (s + 1) / 5))
chronicle.attach("strangers", net, optimizer, scheduler)  # the line
step = 0
if os.path.exists("curriculum.pt"):
    state = torch.load("curriculum.pt")
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"])
    step = state["step"]
while step < 32:
    batch, length = stage(step)
    starts = torch.randint(0, 5900, (batch,))
    rows = torch.stack([text[s : s + length + 1] for s in starts.tolist()])
    loss = nn.functional.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    step += 1
    if step % 5 == 0:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save({**state, "rng": torch.get_rng_state(), "step": step}, "curriculum.pt")
