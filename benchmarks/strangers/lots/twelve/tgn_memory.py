"""A temporal graph network (PyG's TGN): a memory in buffers that forward passes move, reset at every epoch, events in order of time."""

import os

import torch
from torch import nn
from torch_geometric.nn import TransformerConv
from torch_geometric.nn.models.tgn import IdentityMessage, LastAggregator, LastNeighborLoader, TGNMemory

import chronicle

torch.manual_seed(43)
NODES, EVENTS = 30, 120
draw = torch.Generator().manual_seed(8)
src, dst = torch.randint(15, (EVENTS,), generator=draw), torch.randint(15, NODES, (EVENTS,), generator=draw)
when, message = torch.arange(EVENTS) * 3, torch.randn(EVENTS, 4, generator=draw)


class Embedding(nn.Module):
    def __init__(self, time):
        super().__init__()
        self.time, self.conv = time, TransformerConv(12, 6, heads=2, dropout=0.1, edge_dim=4 + 6)

    def forward(self, x, last, edges, t, m):
        passed = (last[edges[0]] - t).to(x.dtype)
        return self.conv(x, edges, torch.cat([self.time(passed), m], -1))


memory = TGNMemory(NODES, 4, 12, 6, message_module=IdentityMessage(4, 12, 6), aggregator_module=LastAggregator())
embed = Embedding(memory.time_enc)
predict = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))
models = nn.ModuleDict({"memory": memory, "embed": embed, "predict": predict})
optimizer = torch.optim.Adam(models.parameters(), lr=3e-3)
chronicle.attach("strangers", models, optimizer)  # the line
neighbours, place = LastNeighborLoader(NODES, size=5), torch.empty(NODES, dtype=torch.long)
first = 0
if os.path.exists("tgn.pt"):
    state = torch.load("tgn.pt", weights_only=False)
    models.load_state_dict(state["models"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["epoch"]
for epoch in range(first, 6):
    models.train()
    memory.reset_state()
    neighbours.reset_state()
    for at in range(0, EVENTS, 15):
        optimizer.zero_grad()
        rows = slice(at, at + 15)
        wrong = torch.randint(15, NODES, (15,))
        ids, edges, events = neighbours(torch.cat([src[rows], dst[rows], wrong]).unique())
        place[ids] = torch.arange(len(ids))
        z, last = memory(ids)
        z = embed(z, last, edges, when[events], message[events])
        pair = lambda other, z=z, rows=rows: predict(torch.cat([z[place[src[rows]]], z[place[other]]], -1))  # noqa: E731
        loss = nn.functional.softplus(-pair(dst[rows])).mean() + nn.functional.softplus(pair(wrong)).mean()
        memory.update_state(src[rows], dst[rows], when[rows], message[rows])
        neighbours.insert(src[rows], dst[rows])
        loss.backward()
        optimizer.step()
        memory.detach()
    torch.save({"models": models.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, "tgn.pt")
