"""Documents packed by first fit into rows with block-diagonal masks; a warm-up, stable, decay schedule."""

import os

import torch
from torch import nn

import chronicle

LENGTH, TOTAL = 32, 42
torch.manual_seed(88)


def documents(seed):
    generator = torch.Generator().manual_seed(seed)
    for n in torch.randint(4, 30, (64,), generator=generator).tolist():
        yield torch.randint(1, 40, (n,), generator=generator)


def pack(docs):
    bins = []
    for doc in docs:
        for row in bins:
            if sum(map(len, row)) + len(doc) <= LENGTH:
                row.append(doc)
                break
        else:
            bins.append([doc])
    for row in bins:
        ids, where, pos = torch.zeros(LENGTH, dtype=torch.long), torch.full((LENGTH,), -1), torch.zeros(LENGTH, dtype=torch.long)
        at = 0
        for number, doc in enumerate(row):
            ids[at : at + len(doc)], where[at : at + len(doc)] = doc, number
            pos[at : at + len(doc)] = torch.arange(len(doc))
            at += len(doc)
        yield {"ids": ids, "doc": where, "pos": pos}


class Model(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.tok, self.pos = nn.Embedding(40, width), nn.Embedding(LENGTH, width)
        self.qkv, self.proj, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, 40, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids, doc, pos):
        x = self.tok(ids) + self.pos(pos)
        b, n, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        same = (doc[:, None, :, None] == doc[:, None, None, :]) & torch.ones(n, n).tril().bool()
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=same)
        return self.head(x + self.proj(y.transpose(1, 2).reshape(b, n, w)))


def wsd(step, warmup=4, decay=12):
    if step < warmup:
        return (step + 1) / warmup
    return 1.0 if step < TOTAL - decay else max(0.0, (TOTAL - step) / decay)


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, wsd)
chronicle.attach("strangers", model, optimizer, scheduler)  # the line
epoch = step = skip = 0
if os.path.exists("packed.pt"):
    state = torch.load("packed.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    epoch, step, skip = state["epoch"], state["step"], state["batch"]
while step < TOTAL:
    rows = list(pack(documents(epoch)))
    loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(epoch))
    for number, batch in enumerate(loader):
        if number < skip:
            continue
        logits = model(batch["ids"], batch["doc"], batch["pos"])
        target = batch["ids"].roll(-1, 1).masked_fill(batch["doc"] != batch["doc"].roll(-1, 1), -100)
        target[batch["doc"] < 0] = -100
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if step % 5 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
            torch.save({**state, "epoch": epoch, "step": step, "batch": number + 1}, "packed.pt")
        if step >= TOTAL:
            break
    epoch, skip = epoch + 1, 0
