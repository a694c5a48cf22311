"""An encoder and a decoder, two optimizers, teacher forcing that fades, greedy decoding between epochs, the LR halved on a plateau by hand."""

import os
import random

import torch
from torch import nn

import chronicle

random.seed(17)
torch.manual_seed(17)
END, WORDS = 0, 14


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(WORDS, 20), nn.GRU(20, 20, batch_first=True)

    def forward(self, x):
        return self.gru(self.embedding(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.cell, self.out, self.drop = nn.Embedding(WORDS, 20), nn.GRUCell(40, 20), nn.Linear(20, WORDS), nn.Dropout(0.1)

    def forward(self, word, hidden, memory):
        weights = (memory @ hidden[..., None]).softmax(1)
        hidden = self.cell(torch.cat([self.drop(self.embedding(word)), (weights * memory).sum(1)], -1), hidden)
        return self.out(hidden), hidden


encoder, decoder = Encoder(), Decoder()
encoder_optimizer = torch.optim.RMSprop(encoder.parameters(), lr=4e-3)
decoder_optimizer = torch.optim.Adam(decoder.parameters(), lr=4e-3, amsgrad=True)
chronicle.attach("strangers", [encoder, decoder], [encoder_optimizer, decoder_optimizer])  # the line
pairs = [[draw.randrange(1, WORDS) for _ in range(6)] for draw in [random.Random(3)] for _ in range(80)]
first, worst, waited = 0, 9.0, 0
if os.path.exists("chat_checkpoint.tar"):
    saved = torch.load("chat_checkpoint.tar")
    encoder.load_state_dict(saved["en"])
    decoder.load_state_dict(saved["de"])
    encoder_optimizer.load_state_dict(saved["en_opt"])
    decoder_optimizer.load_state_dict(saved["de_opt"])
    first, worst, waited = saved["epoch"], saved["worst"], saved["waited"]


def run(rows, ratio):
    x = torch.tensor(rows)
    memory, hidden = encoder(x)
    word, hidden, loss, said = torch.zeros(len(x), dtype=torch.long), hidden[0], 0.0, []
    forced = random.random() < ratio
    for t in range(6):
        scores, hidden = decoder(word, hidden, memory)
        aim = x[:, 5 - t]
        loss = loss + nn.functional.cross_entropy(scores, aim)
        said.append(scores.argmax(-1))
        word = aim if forced else said[-1]
    return loss / 6, said


for epoch in range(first, 9):
    random.shuffle(pairs)
    for start in range(0, 80, 16):
        loss, _ = run(pairs[start : start + 16], 1 - epoch / 9)
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(encoder.parameters(), 5.0)
        nn.utils.clip_grad_norm_(decoder.parameters(), 5.0)
        encoder_optimizer.step()
        decoder_optimizer.step()
    encoder.eval()
    decoder.eval()
    with torch.no_grad():
        held = run(pairs[:16], 0.0)[0].item()
    encoder.train()
    decoder.train()
    worst, waited = (held, 0) if held < worst - 0.02 else (worst, waited + 1)
    if waited >= 2:
        waited = 0
        for optimizer in (encoder_optimizer, decoder_optimizer):
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
    states = {"en": encoder.state_dict(), "de": decoder.state_dict(), "en_opt": encoder_optimizer.state_dict(), "de_opt": decoder_optimizer.state_dict()}
    torch.save({**states, "epoch": epoch + 1, "worst": worst, "waited": waited}, "chat_checkpoint.tar")
