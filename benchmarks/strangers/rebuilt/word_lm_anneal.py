"""A word language model: hidden state carried on, SGD whose rate is cut to a quarter when validation stalls."""

import os

import torch
from torch import nn

import chronicle

torch.manual_seed(1111)
WORDS, LENGTH = 24, 6
train, held_out = torch.randint(WORDS, (60, 4)), torch.randint(WORDS, (13, 4))


class WordModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.drop = nn.Embedding(WORDS, 12), nn.Dropout(0.2)
        self.memory, self.out = nn.LSTM(12, 12, 2, dropout=0.2), nn.Linear(12, WORDS)
        self.out.weight = self.words.weight  # tied

    def forward(self, x, hidden):
        y, hidden = self.memory(self.drop(self.words(x)), hidden)
        return self.out(self.drop(y)), hidden


def pieces(source):
    return [(source[i : i + LENGTH], source[i + 1 : i + 1 + LENGTH]) for i in range(0, len(source) - LENGTH - 1, LENGTH)]


model, rate, best, first = WordModel(), 20.0, float("inf"), 0
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
chronicle.attach("strangers", model, optimizer)  # the line
if os.path.exists("lm.pt"):
    saved = torch.load("lm.pt", weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    rate, best, first = saved["rate"], saved["best"], saved["epoch"]
for epoch in range(first, 5):
    model.train()
    hidden = None
    for x, y in pieces(train):
        hidden = None if hidden is None else tuple(h.detach() for h in hidden)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        logits, hidden = model(x, hidden)
        nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        loss = sum(nn.functional.cross_entropy(model(x, None)[0].flatten(0, 1), y.flatten()) for x, y in pieces(held_out))
    best, rate = (float(loss), rate) if loss < best else (best, rate / 4)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rate": rate, "best": best}
    torch.save({**state, "epoch": epoch + 1}, "lm.pt")
