"""A language model whose LSTM carries its state over batches; the state is in the checkpoint, dropout is locked over time."""

import os

import torch
from torch import nn

import chronicle

torch.manual_seed(59)


class Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(40, 16), nn.LSTM(16, 24, 2, batch_first=True), nn.Linear(24, 40)
        self.carried = None

    def forward(self, ids):
        x = self.embed(ids)
        if self.training:
            x = x * torch.bernoulli(torch.full((x.shape[0], 1, x.shape[2]), 0.8)) / 0.8
        out, carried = self.lstm(x, self.carried)
        self.carried = tuple(part.detach() for part in carried)
        return self.head(out)


model = Locked()
optimizer = torch.optim.ASGD(model.parameters(), lr=0.5, t0=0, lambd=0.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.7)
chronicle.attach("strangers", model, optimizer, scheduler)  # the line
text = torch.randint(40, (4, 400), generator=torch.Generator().manual_seed(0))
place = 0
if os.path.exists("lstm.pt"):
    state = torch.load("lstm.pt", weights_only=False)
    for name, part in {"model": model, "optimizer": optimizer, "scheduler": scheduler}.items():
        part.load_state_dict(state[name])
    model.carried, place = state["carried"], state["place"]
    torch.set_rng_state(state["rng"])
while place < 380:
    length = 8 + place % 5
    ids = text[:, place : place + length + 1]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    scheduler.step()
    place += length
    if scheduler.last_epoch % 4 == 0:
        parts = {name: part.state_dict() for name, part in {"model": model, "optimizer": optimizer, "scheduler": scheduler}.items()}
        torch.save({**parts, "carried": model.carried, "place": place, "rng": torch.get_rng_state()}, "lstm.pt")
