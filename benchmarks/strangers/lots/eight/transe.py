"""Knowledge graph embeddings (TransE): entities are normalised before every batch, negatives drawn anew, margin loss."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader

import chronicle

torch.manual_seed(0)


class TransE(nn.Module):
    def __init__(self, entities, relations, dim):
        super().__init__()
        self.entity, self.relation = nn.Embedding(entities, dim), nn.Embedding(relations, dim)
        nn.init.uniform_(self.entity.weight, -0.5, 0.5)

    def normalise(self):
        self.entity.weight.data = nn.functional.normalize(self.entity.weight.data, dim=1)

    def forward(self, head, relation, tail):
        return (self.entity(head) + self.relation(relation) - self.entity(tail)).norm(p=1, dim=1)


triples = torch.stack([torch.randint(50, (160,)), torch.randint(6, (160,)), torch.randint(50, (160,))], 1)
model = TransE(50, 6, 12)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
chronicle.attach("strangers", model, optimizer, scheduler)  # the line
first = 0
if os.path.exists("transe.pt"):
    saved = torch.load("transe.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    first = saved["epoch"]
for epoch in range(first, 6):
    for batch in DataLoader(triples, batch_size=32, shuffle=True):
        model.normalise()
        head, relation, tail = batch.unbind(1)
        wrong = torch.randint(50, tail.shape)
        optimizer.zero_grad()
        nn.functional.relu(1 + model(head, relation, tail) - model(head, relation, wrong)).mean().backward()
        optimizer.step()
    scheduler.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**state, "epoch": epoch + 1}, "transe.pt")
