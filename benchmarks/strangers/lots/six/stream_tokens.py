"""An IterableDataset that cuts documents into blocks, shards by worker, and skips the blocks that were seen before."""

import glob
import os
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import chronicle


class Blocks(IterableDataset):
    def __init__(self, skip=0, size=16):
        self.skip, self.size = skip, size

    def documents(self):
        chance = random.Random(5)
        while True:
            yield [chance.randrange(1, 30) for _ in range(chance.randrange(5, 40))] + [0]

    def __iter__(self):
        info = get_worker_info()
        mine, of = (info.id, info.num_workers) if info else (0, 1)
        buffer, number = [], 0
        for document in self.documents():
            buffer += document
            while len(buffer) > self.size:
                block, buffer = buffer[: self.size + 1], buffer[self.size :]
                if number >= self.skip and number % of == mine:
                    yield torch.tensor(block)
                number += 1


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(30, 16), nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 30)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


torch.manual_seed(6)
model = LSTM()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.ChainedScheduler(
    [
        torch.optim.lr_scheduler.ConstantLR(optimizer, 0.2, 4),
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97),
    ]
)
chronicle.attach("strangers", model, optimizer, scheduler)  # the line
step = 0
checkpoints = sorted(glob.glob("lm/step_*.bin"))
if checkpoints:
    state = torch.load(checkpoints[-1])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
    scheduler.load_state_dict(state["sched"])
    step = state["step"]
os.makedirs("lm", exist_ok=True)
stream = DataLoader(Blocks(skip=step * 4), batch_size=4)
for batch in stream:
    logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
    step += 1
    if step % 4 == 0:
        state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "sched": scheduler.state_dict(), "step": step}
        torch.save(state, f"lm/step_{step:05d}.bin")
        for old in sorted(glob.glob("lm/step_*.bin"))[:-3]:
            os.remove(old)
    if step >= 40:
        break
