"""Bytes with x-transformers' autoregressive wrapper: windows drawn at random, accumulation by hand, text generated now and then."""

import os

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

import chronicle

model = AutoregressiveWrapper(
    TransformerWrapper(num_tokens=256, max_seq_len=32, attn_layers=Decoder(dim=32, depth=2, heads=2, rotary_pos_emb=True))
)
optim = torch.optim.Adam(model.parameters(), lr=1e-3)
chronicle.attach("strangers", model, optim)  # the line
text = torch.randint(32, 127, (5000,), generator=torch.Generator().manual_seed(6))
start = 0
if os.path.exists("enwik.pt"):
    saved = torch.load("enwik.pt")
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    start = saved["i"] + 1
for i in range(start, 28):
    model.train()
    for _ in range(2):
        at = torch.randint(0, len(text) - 33, (4,))
        loss = model(torch.stack([text[a : a + 33] for a in at.tolist()]))
        (loss / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optim.step()
    optim.zero_grad()
    if i % 10 == 0:
        model.eval()
        model.generate(prompts=text[None, :8], seq_len=4)
    if i % 4 == 3:
        torch.save({"model": model.state_dict(), "optim": optim.state_dict(), "i": i}, "enwik.pt")
