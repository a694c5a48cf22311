"""Lion with decoupled decay on a byte model; four micro-batches a step drawn with `random`, generators saved and restored."""

import os
import random

import torch
from lion_pytorch import Lion
from torch import nn

import chronicle

random.seed(13), torch.manual_seed(13)
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True), 2)
embed, head = nn.Embedding(64, 16), nn.Linear(16, 64)
whole = nn.ModuleDict({"embed": embed, "body": model, "head": head})
decay = [p for p in whole.parameters() if p.dim() > 1]
other = [p for p in whole.parameters() if p.dim() <= 1]
optimizer = Lion([{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}], lr=3e-4)
chronicle.attach("strangers", whole, optimizer, accumulation=4)  # the line
text = [random.Random(1).randrange(64) for _ in range(800)]
step = 0
if os.path.exists("lion.pt"):
    saved = torch.load("lion.pt", weights_only=False)
    whole.load_state_dict(saved["model"]), optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
    random.setstate(saved["python"]), torch.set_rng_state(saved["torch"])
while step < 36:
    for _ in range(4):
        begins = [random.randrange(780) for _ in range(4)]
        rows = torch.tensor([text[i : i + 17] for i in begins])
        logits = head(model(embed(rows[:, :-1]), mask=nn.Transformer.generate_square_subsequent_mask(16), is_causal=True))
        (nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / 4).backward()
    nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 4 == 0:
        generators = {"python": random.getstate(), "torch": torch.get_rng_state()}
        torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict(), "step": step, **generators}, "lion.pt")
