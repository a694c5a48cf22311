"""Speech by CTC: a batch sampler by length with a state of its own, masks over the spectrogram, Noam, several files a checkpoint."""

import glob
import json
import os
import random

import torch
from torch import nn

import chronicle

random.seed(21)
torch.manual_seed(21)


class Buckets:
    def __init__(self, lengths, size, seed=0):
        self.lengths, self.size, self.seed, self.epoch, self.at = lengths, size, seed, 0, 0

    def __iter__(self):
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        batches = [order[i : i + self.size] for i in range(0, len(order), self.size)]
        random.Random(self.seed + self.epoch).shuffle(batches)
        while self.at < len(batches):
            self.at += 1
            yield batches[self.at - 1]
        self.epoch, self.at = self.epoch + 1, 0

    def __len__(self):
        return -(-len(self.lengths) // self.size)


def collate(rows):
    sounds, words = zip(*rows, strict=True)
    widths = torch.tensor([len(one) for one in sounds])
    return nn.utils.rnn.pad_sequence(sounds, batch_first=True), widths, torch.cat(words), torch.tensor([len(one) for one in words])


class Block(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.mix, self.batch_norm = nn.Conv1d(width, width, 5, padding=2, groups=width), nn.BatchNorm1d(width)
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 48), nn.SiLU(), nn.Dropout(0.1), nn.Linear(48, width))

    def forward(self, x, hidden):
        y = self.norm(x)
        x = x + self.attention(y, y, y, key_padding_mask=hidden, need_weights=False)[0]
        x = x + nn.functional.silu(self.batch_norm(self.mix(x.mT))).mT
        return x + self.out(x)


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.front, self.blocks, self.head = nn.Linear(12, 24), nn.ModuleList(Block() for _ in range(2)), nn.Linear(24, 8)

    def forward(self, x, widths):
        if self.training:
            for row in x:
                low = random.randrange(10)
                row[:, low : low + 2] = 0
        hidden = torch.arange(x.shape[1])[None] >= widths[:, None]
        x = self.front(x)
        for block in self.blocks:
            x = block(x, hidden)
        return self.head(x).log_softmax(-1)


draw = random.Random(5)
lengths = [draw.randrange(12, 30) for _ in range(64)]
made = torch.Generator().manual_seed(2)
rows = [(torch.randn(n, 12, generator=made), torch.randint(1, 8, (n // 6,), generator=made)) for n in lengths]
buckets = Buckets(lengths, 8)
loader = torch.utils.data.DataLoader(rows, batch_sampler=buckets, collate_fn=collate)
model = Recogniser()
optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
noam = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 24**-0.5 * min((n + 1) ** -0.5, (n + 1) * 12**-1.5) * 0.1)
chronicle.attach("strangers", model, optimizer, noam, data=loader)  # the line
step = 0
for folder in sorted(glob.glob("exp/step-*"), key=lambda name: int(name.split("-")[-1]))[-1:]:
    model.load_state_dict(torch.load(f"{folder}/model.pt"))
    optimizer.load_state_dict(torch.load(f"{folder}/optimizer.pt"))
    with open(f"{folder}/state.json") as file:
        state = json.load(file)
    noam.load_state_dict({**noam.state_dict(), **state["noam"]})
    buckets.epoch, buckets.at, step = state["epoch"], state["at"], state["step"]
while step < 50:
    for sounds, widths, words, counts in loader:
        loss = nn.functional.ctc_loss(model(sounds, widths).transpose(0, 1), words, widths, counts, zero_infinity=True)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        noam.step()
        step += 1
        if step % 5 == 0:
            folder = f"exp/step-{step}"
            os.makedirs(folder, exist_ok=True)
            torch.save(model.state_dict(), f"{folder}/model.pt")
            torch.save(optimizer.state_dict(), f"{folder}/optimizer.pt")
            plan = {"last_epoch": noam.last_epoch, "_step_count": noam._step_count, "_last_lr": noam.get_last_lr()}
            with open(f"{folder}/state.json", "w") as file:
                json.dump({"noam": plan, "epoch": buckets.epoch, "at": buckets.at, "step": step}, file)
