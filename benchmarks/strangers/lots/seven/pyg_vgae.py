"""A variational graph auto-encoder of torch_geometric: one graph, full batches, negative edges drawn anew each epoch."""

import os

import torch
from torch_geometric.nn import VGAE, GCNConv
from torch_geometric.utils import erdos_renyi_graph

import chronicle

torch.manual_seed(12)


class Encoder(torch.nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.first, self.mean, self.std = GCNConv(width, 2 * out, cached=True), GCNConv(2 * out, out), GCNConv(2 * out, out)

    def forward(self, x, edges):
        h = self.first(x, edges).relu()
        return self.mean(h, edges), self.std(h, edges)


edges = erdos_renyi_graph(60, 0.1)
x = torch.randn(60, 16)
model = VGAE(Encoder(16, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
chronicle.attach("strangers", model, optimizer)  # the line
start = 1
if os.path.exists("vgae.pt"):
    saved = torch.load("vgae.pt")
    model.load_state_dict(saved["model_state_dict"])
    optimizer.load_state_dict(saved["optimizer_state_dict"])
    start = saved["epoch"] + 1
for epoch in range(start, 40):
    model.train()
    optimizer.zero_grad()
    z = model.encode(x, edges)
    loss = model.recon_loss(z, edges) + model.kl_loss() / 60
    loss.backward()
    optimizer.step()
    if epoch % 5 == 0:
        model.eval()
        with torch.no_grad():
            model.test(model.encode(x, edges), edges, erdos_renyi_graph(60, 0.05))
        state = {"epoch": epoch, "model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
        torch.save({**state, "loss": loss.item()}, "vgae.pt")
